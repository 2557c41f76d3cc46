//! Where the workspace is.

use std::path::{Path, PathBuf};

/// The workspace's folder.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package stands in the workspace").to_path_buf()
}
