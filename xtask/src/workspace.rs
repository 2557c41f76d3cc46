//! Where the workspace is, and commands there.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

/// The workspace's folder.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package stands in the workspace").to_path_buf()
}

/// An environment variable with flags, and one more.
pub(crate) fn appended(variable: &str, flag: &str) -> OsString {
    let mut flags = env::var_os(variable).unwrap_or_default();
    if !flags.is_empty() {
        flags.push(" ");
    }
    flags.push(flag);
    flags
}

/// A command of a step in the workspace, with `target/<step>` as its target folder: flags of its own would make every other
/// build start over.
pub(crate) fn in_workspace<'a>(command: &'a mut Command, step: &str) -> &'a mut Command {
    let workspace = workspace();
    command.current_dir(&workspace).env("CARGO_TARGET_DIR", workspace.join("target").join(step))
}
