//! Programs built here for the guest.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::process::run;

/// Programs by the name that they have in the guest.
#[derive(Debug, Default)]
pub(super) struct Programs {
    by_name: BTreeMap<String, PathBuf>,
}

impl Programs {
    /// Adds a program of this machine. Returns its name in the guest.
    pub(super) fn add(&mut self, path: &Path) -> Result<String> {
        let path = path.canonicalize().with_context(|| format!("there is no program {}", path.display()))?;
        let name = path.file_name().and_then(|name| name.to_str()).context("a program's name is text")?.to_owned();
        let known = self.by_name.insert(name.clone(), path.clone());
        ensure!(known.is_none_or(|known| known == path), "two programs are called {name}");
        Ok(name)
    }

    /// Copies all to a guest's share, without what only a debugger reads: the guest reads slowly.
    pub(super) fn copy_to(&self, share: &Path) -> Result<()> {
        let bin = share.join("bin");
        if self.by_name.is_empty() {
            return Ok(());
        }
        fs::create_dir_all(&bin)?;
        let mut places = String::new();
        for (name, path) in &self.by_name {
            run(Command::new("strip").arg("--strip-debug").arg("-o").arg(bin.join(name)).arg(path))?;
            places += &format!("{name} {}\n", path.display());
        }
        fs::write(share.join("places"), places)?;
        Ok(())
    }
}
