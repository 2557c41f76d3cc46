//! The guest's kernel: the one that Debian calls `linux-image-amd64`, downloaded and unpacked, never installed.
//!
//! What the guest needs of it (the image, and the modules in the order in which they load) is kept in the user's cache
//! folder; the package itself is 70 MB to download and 400 MB unpacked.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::{
    host,
    process::{output_of, run},
};

/// Depends on the current kernel. The `cloud` flavour has neither `rdma_rxe` nor `9p`.
const META_PACKAGE: &str = "linux-image-amd64";

/// What the guest loads, each after what it depends on.
const MODULES: [&str; 9] =
    ["virtio_pci", "9pnet_virtio", "9p", "dummy", "virtio_net", "sch_netem", "crc32_generic", "rdma_rxe", "ib_uverbs"];

/// A kernel's image and modules on this machine.
#[derive(Debug)]
pub(super) struct Kernel {
    /// A folder with `vmlinuz`, and `modules/` with the files and their `order`.
    dir: PathBuf,
}

impl Kernel {
    /// The kernel kept from an earlier run, or else a downloaded one.
    pub(super) fn obtain() -> Result<Self> {
        let cache = cache_dir()?;
        if let Some(kernel) = Self::kept(&cache)? {
            return Ok(kernel);
        }
        fs::create_dir_all(&cache).with_context(|| format!("making {}", cache.display()))?;
        // Two runs may do this at the same time: each in a folder of its own, and the last to finish stays.
        let work = tempfile::Builder::new().prefix("fetch-").tempdir_in(&cache)?;
        let package = host::download(META_PACKAGE, work.path())?;
        let name = package.file_stem().context("the package has no name")?.to_owned();
        let root = work.path().join("root");
        run(Command::new("dpkg").arg("-x").arg(&package).arg(&root))?;
        let unpacked = work.path().join("kernel");
        collect(&root, &unpacked)?;
        let dir = cache.join(name);
        if let Err(error) = fs::rename(&unpacked, &dir) {
            ensure!(dir.join("vmlinuz").exists(), "moving the kernel to {}: {error}", dir.display());
        }
        Ok(Self { dir })
    }

    fn kept(cache: &Path) -> Result<Option<Self>> {
        let Ok(entries) = fs::read_dir(cache) else { return Ok(None) };
        let mut dirs: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        dirs.retain(|dir| dir.join("vmlinuz").exists());
        dirs.sort();
        Ok(dirs.pop().map(|dir| Self { dir }))
    }

    /// The image to boot.
    pub(super) fn image(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// The folder of the modules, with a file `order`: one name a line, and the module's options.
    pub(super) fn modules(&self) -> PathBuf {
        self.dir.join("modules")
    }
}

fn cache_dir() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ => PathBuf::from(env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache"),
    };
    Ok(base.join("farlink").join("softroce"))
}

/// Moves what a guest needs out of an unpacked package.
fn collect(root: &Path, into: &Path) -> Result<()> {
    let version = only_entry(&root.join("lib/modules"))?;
    run(Command::new("depmod").arg("-b").arg(root).arg(&version))?;
    let modules = into.join("modules");
    fs::create_dir_all(&modules)?;
    let mut order = String::new();
    for module in MODULES {
        let shown =
            output_of(Command::new("modprobe").arg("-d").arg(root).args(["-S", &version, "--show-depends", module]))?;
        for line in shown.lines() {
            // insmod PATH OPTIONS; a module that is part of the image is shown as `builtin NAME`.
            let mut words = line.split_whitespace();
            let (Some("insmod"), Some(path)) = (words.next(), words.next()) else { continue };
            let name = unpack_module(Path::new(path), &modules)?;
            let entry = [name.as_str()].into_iter().chain(words).collect::<Vec<_>>().join(" ");
            if !order.lines().any(|known| known == entry) {
                order += &entry;
                order.push('\n');
            }
        }
    }
    fs::write(modules.join("order"), order)?;
    fs::rename(root.join("boot").join(format!("vmlinuz-{version}")), into.join("vmlinuz"))
        .context("the package has no kernel image where it should be")
}

/// Copies a module, without its compression: busybox knows none. Returns its file's name.
fn unpack_module(path: &Path, into: &Path) -> Result<String> {
    let file = path.file_name().and_then(|name| name.to_str()).context("a module without a name")?;
    let name = file.trim_end_matches(".xz");
    let to = into.join(name);
    fs::copy(path, into.join(file)).with_context(|| format!("copying {}", path.display()))?;
    if name != file {
        run(Command::new("xz").args(["--decompress", "--force"]).arg(into.join(file)))?;
    }
    ensure!(to.exists(), "{} was not unpacked", path.display());
    Ok(name.to_owned())
}

fn only_entry(dir: &Path) -> Result<String> {
    let mut entries = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let entry = entries.next().with_context(|| format!("{} is empty", dir.display()))??;
    Ok(entry.file_name().to_string_lossy().into_owned())
}
