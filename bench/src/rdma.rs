//! The way to memory servers over RDMA, where this program was built with it.

use std::sync::Arc;

#[cfg(not(feature = "verbs"))]
use anyhow::bail;
use clap::{Args, value_parser};
use farlink_runtime::fabric::Fabric;
#[cfg(feature = "verbs")]
use farlink_runtime::fabric::verbs::{DeviceChoice, Secret, VerbsFabric, VerbsOptions};
use serde::{Deserialize, Serialize};

/// This machine's end of RDMA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CardArgs {
    /// The RDMA device, as `farlink devices` lists it; the first with an active port.
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// The device's port, from 1; the first that is active.
    #[arg(long, value_name = "NUMBER", value_parser = value_parser!(u8).range(1..))]
    pub(crate) port: Option<u8>,
    /// The port's address, by its index; the best for RoCE v2.
    #[arg(long, value_name = "INDEX")]
    pub(crate) gid_index: Option<u8>,
    /// The network may place WRITEs of one connection in another order, as those with adaptive routing do: do not rely on it. To be given to
    /// all memory servers; who connects to them hears of it.
    #[arg(long)]
    pub(crate) unordered: bool,
}

#[cfg(not(feature = "verbs"))]
pub(crate) const BUILD: &str = "this farlink was built without RDMA; build it with `cargo build --release -p farlink --features \
                     verbs` (on Debian that needs libibverbs-dev, librdmacm-dev, pkg-config and libclang-14-dev, and \
                     LIBCLANG_PATH=/usr/lib/llvm-14/lib)";

#[cfg(feature = "verbs")]
pub(crate) fn choice(card: &CardArgs) -> DeviceChoice {
    DeviceChoice { name: card.device.clone(), port: card.port, gid_index: card.gid_index }
}

/// How to reach memory servers over RDMA.
#[cfg(feature = "verbs")]
pub(crate) fn options(servers: &[String], card: &CardArgs, secret: &Secret) -> VerbsOptions {
    let defaults = VerbsOptions::new(servers.iter().cloned(), secret.clone());
    VerbsOptions { device: choice(card), ordered: !card.unordered, ..defaults }
}

#[cfg(not(feature = "verbs"))]
pub(crate) fn fabric(_servers: &[String], _card: &CardArgs, _secret: &str) -> anyhow::Result<Arc<dyn Fabric>> {
    bail!(BUILD)
}

#[cfg(feature = "verbs")]
/// The way to memory servers over RDMA.
pub(crate) fn fabric(servers: &[String], card: &CardArgs, secret: &str) -> anyhow::Result<Arc<dyn Fabric>> {
    Ok(Arc::new(VerbsFabric::connect(&options(servers, card, &Secret::new(secret.as_bytes())?))?))
}
