//! What this machine must have: Debian packages, and root where one of them is missing.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::process::{output_of, run};

/// The packages, each with a program or file by which to know that it is there.
const PACKAGES: [(&str, &str); 11] = [
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64"),
    ("busybox-static", "/bin/busybox"),
    ("cpio", "/bin/cpio"),
    ("kmod", "/sbin/modprobe"),
    ("xz-utils", "/usr/bin/xz"),
    ("pkg-config", "/usr/bin/pkg-config"),
    ("iproute2", "/sbin/tc"),
    ("ibverbs-providers", "/etc/libibverbs.d/rxe.driver"),
    ("ibverbs-utils", "/usr/bin/ibv_devinfo"),
    ("libibverbs-dev", "/usr/include/infiniband/verbs.h"),
    // Only because the bindings ask for its headers.
    ("librdmacm-dev", "/usr/include/rdma/rdma_cma.h"),
];

/// What generates the bindings to libibverbs. `rdma-sys` builds with this version of clang, and not with 16.
const CLANG_PACKAGES: [&str; 2] = ["libclang1-14", "libclang-common-14-dev"];
const CLANG_DIR: &str = "/usr/lib/llvm-14/lib";

/// Why this machine cannot run a guest, though nothing is wrong with farlink.
#[derive(Debug)]
pub(super) struct Unable(String);

impl fmt::Display for Unable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unable {}

/// Installs what is missing.
///
/// # Errors
/// [`Unable`] if something is missing that cannot be installed.
pub(super) fn prepare() -> Result<()> {
    let mut missing: Vec<&str> =
        PACKAGES.iter().filter(|(_, file)| !Path::new(file).exists()).map(|&(package, _)| package).collect();
    if !Path::new(CLANG_DIR).join("libclang.so.1").exists() || !Path::new(CLANG_DIR).join("clang").exists() {
        missing.extend(CLANG_PACKAGES);
    }
    if missing.is_empty() {
        return Ok(());
    }
    let unable = |why: &str| Unable(format!("{why}; it needs the Debian packages {}", missing.join(" ")));
    ensure!(Path::new("/usr/bin/apt-get").exists(), unable("this machine has no apt-get"));
    let user = output_of(Command::new("id").arg("-u"))?;
    ensure!(user.trim() == "0", unable("packages are missing and only root can install them: run it once as root"));
    println!("softroce: installing {}", missing.join(" "));
    let install = |()| run(apt_get().args(["install", "--yes", "--no-install-recommends"]).args(&missing));
    update().and_then(install).map_err(|error| unable(&format!("{error:#}")).into())
}

/// Where the libclang is that `rdma-sys` builds with.
pub(super) fn libclang_dir() -> &'static Path {
    Path::new(CLANG_DIR)
}

/// Downloads the package that `meta` depends on, and does not install it.
pub(super) fn download(meta: &str, into: &Path) -> Result<PathBuf> {
    let package = match newest_of(meta)? {
        Some(package) => package,
        None => {
            update()?;
            newest_of(meta)?.with_context(|| Unable(format!("apt knows no package {meta}")))?
        }
    };
    println!("softroce: fetching {package}");
    let fetch = |package: &str| run(apt_get().args(["download", package]).current_dir(into));
    if fetch(&package).is_err() {
        // The lists may be older than what the archive holds now.
        update()?;
        let package = newest_of(meta)?.with_context(|| format!("apt knows no package {meta}"))?;
        fetch(&package).map_err(|error| Unable(format!("{error:#}")))?;
    }
    let mut files = std::fs::read_dir(into)?.filter_map(|entry| Some(entry.ok()?.path()));
    files.find(|path| path.extension().is_some_and(|end| end == "deb")).context("apt-get download left no package")
}

fn newest_of(meta: &str) -> Result<Option<String>> {
    let shown = output_of(Command::new("apt-cache").args(["depends", "--important", meta])).unwrap_or_default();
    Ok(shown.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned))
}

fn update() -> Result<()> {
    run(apt_get().arg("update")).map_err(|error| Unable(format!("{error:#}")).into())
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-o", "DPkg::Lock::Timeout=300"]);
    command
}
