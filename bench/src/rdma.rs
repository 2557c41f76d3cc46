//! The way to memory servers over RDMA, where this program was built with it.

use std::sync::Arc;

#[cfg(not(feature = "verbs"))]
use anyhow::bail;
use farlink_runtime::fabric::Fabric;
#[cfg(feature = "verbs")]
use farlink_runtime::fabric::verbs::{DeviceChoice, Secret, VerbsFabric, VerbsOptions};

#[cfg(not(feature = "verbs"))]
pub(crate) const BUILD: &str = "this farlink was built without RDMA; build it with `cargo build --release -p farlink --features \
                     verbs` (on Debian that needs libibverbs-dev, librdmacm-dev, pkg-config and libclang-14-dev, and \
                     LIBCLANG_PATH=/usr/lib/llvm-14/lib)";

#[cfg(feature = "verbs")]
pub(crate) fn choice(device: Option<&str>, gid_index: Option<u8>) -> DeviceChoice {
    DeviceChoice { name: device.map(str::to_owned), port: None, gid_index }
}

#[cfg(not(feature = "verbs"))]
pub(crate) fn fabric(
    _servers: &[String],
    _device: Option<&str>,
    _gid_index: Option<u8>,
    _secret: &str,
) -> anyhow::Result<Arc<dyn Fabric>> {
    bail!(BUILD)
}

#[cfg(feature = "verbs")]
/// The way to memory servers over RDMA.
pub(crate) fn fabric(
    servers: &[String],
    device: Option<&str>,
    gid_index: Option<u8>,
    secret: &str,
) -> anyhow::Result<Arc<dyn Fabric>> {
    let secret = Secret::new(secret.as_bytes())?;
    let options =
        VerbsOptions { device: choice(device, gid_index), ..VerbsOptions::new(servers.iter().cloned(), secret) };
    Ok(Arc::new(VerbsFabric::connect(&options)?))
}
