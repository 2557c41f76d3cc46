//! The guest's file system: busybox, the kernel's modules, and the host's own RDMA tools with their libraries.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use super::{kernel::Kernel, process::output_of};

const INIT: &str = include_str!("init.sh");

/// Programs of the host that the guest has, too.
const TOOLS: [&str; 6] = [
    "/sbin/ip",
    "/sbin/tc",
    "/usr/bin/rdma",
    "/usr/bin/ibv_devices",
    "/usr/bin/ibv_devinfo",
    "/usr/bin/ibv_rc_pingpong",
];

/// Libraries that Rust programs use and the tools may not, and the driver, which libibverbs loads by its name.
const LIBRARIES: [&str; 5] = [
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/lib/x86_64-linux-gnu/libm.so.6",
    "/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so",
];

/// Writes the archive to `to`; `work` is an empty folder.
pub(super) fn build(kernel: &Kernel, work: &Path, to: &Path) -> Result<()> {
    let bin = work.join("bin");
    fs::create_dir_all(&bin)?;
    fs::copy("/bin/busybox", bin.join("busybox"))?;
    for applet in output_of(Command::new("/bin/busybox").arg("--list"))?.lines() {
        let link = bin.join(applet);
        if !link.exists() {
            symlink("busybox", link)?;
        }
    }
    for tool in TOOLS {
        let to = bin.join(Path::new(tool).file_name().context("a tool without a name")?);
        if to.symlink_metadata().is_ok() {
            fs::remove_file(&to)?;
        }
        fs::copy(tool, to).with_context(|| format!("copying {tool}"))?;
    }
    for library in libraries()? {
        let to = work.join(library.strip_prefix("/")?);
        fs::create_dir_all(to.parent().context("a library without a folder")?)?;
        fs::copy(&library, to).with_context(|| format!("copying {}", library.display()))?;
    }
    let drivers = work.join("etc/libibverbs.d");
    fs::create_dir_all(&drivers)?;
    fs::write(drivers.join("rxe.driver"), "driver rxe\n")?;
    fs::write(work.join("etc/passwd"), "root:x:0:0:root:/tmp:/bin/sh\n")?;
    fs::write(work.join("etc/hosts"), "127.0.0.1 localhost\n")?;
    let modules = work.join("modules");
    fs::create_dir_all(&modules)?;
    for file in fs::read_dir(kernel.modules())? {
        let file = file?;
        fs::copy(file.path(), modules.join(file.file_name()))?;
    }
    fs::write(work.join("init"), INIT)?;
    fs::set_permissions(work.join("init"), fs::Permissions::from_mode(0o755))?;
    archive(work, to)
}

/// All shared libraries, and the loader, by the paths under which programs look for them.
fn libraries() -> Result<BTreeSet<PathBuf>> {
    let mut found: BTreeSet<PathBuf> = LIBRARIES.iter().map(PathBuf::from).collect();
    let shown = output_of(Command::new("ldd").args(TOOLS).args(LIBRARIES))?;
    for line in shown.lines() {
        // NAME => PATH (ADDRESS), or PATH (ADDRESS) for the loader.
        let path = line.split("=> ").last().unwrap_or(line).split_whitespace().next().unwrap_or_default();
        if path.starts_with('/') && !path.ends_with(':') {
            found.insert(PathBuf::from(path));
        }
    }
    Ok(found)
}

/// Uncompressed: under emulation the kernel is slower at unpacking than at reading.
fn archive(dir: &Path, to: &Path) -> Result<()> {
    let mut cpio = Command::new("cpio")
        .args(["--create", "--quiet", "--format=newc", "--owner=+0:+0"])
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(File::create(to).with_context(|| format!("making {}", to.display()))?)
        .spawn()
        .context("starting cpio")?;
    let names = output_of(Command::new("find").arg(".").current_dir(dir))?;
    cpio.stdin.take().context("cpio has no input")?.write_all(names.as_bytes())?;
    ensure!(cpio.wait()?.success(), "cpio failed");
    Ok(())
}
