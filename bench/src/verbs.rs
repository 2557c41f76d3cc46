//! `farlink serve` and `farlink devices` over RDMA, where this program was built with it.

#[cfg(feature = "verbs")]
pub(crate) use with::{devices, serve};
#[cfg(not(feature = "verbs"))]
pub(crate) use without::{devices, serve};

#[cfg(not(feature = "verbs"))]
mod without {
    use anyhow::bail;
    use farlink_offload::ship::Registry;

    use crate::args::{DevicesArgs, ServeArgs};
    use crate::rdma::BUILD;

    pub(crate) fn serve(_args: &ServeArgs, _registry: Registry) -> anyhow::Result<()> {
        bail!(BUILD)
    }

    pub(crate) fn devices(_args: &DevicesArgs) -> anyhow::Result<()> {
        bail!(BUILD)
    }
}

#[cfg(feature = "verbs")]
mod with {
    use std::io::{self, Write as _};
    use std::sync::Arc;

    use anyhow::ensure;
    use farlink_offload::ship::{Registry, ShipServer};
    use farlink_runtime::error::Error;
    use farlink_runtime::fabric::verbs::{
        self, DeviceInfo, PortInfo, PortState, Secret, VerbsFabric, VerbsServeOptions, VerbsServer,
    };

    use crate::args::{DevicesArgs, ServeArgs};
    use crate::place::SECRET_VARIABLE;
    use crate::rdma::{self, choice};
    use crate::serve::{self, StopSignals, announce_ready};
    use crate::units::show_bytes;

    /// Serves memory over RDMA until told to stop.
    pub(crate) fn serve(args: &ServeArgs, registry: Registry) -> anyhow::Result<()> {
        let signals = StopSignals::watch()?;
        let (given, out) = (args.verbs.secret()?, &mut io::stdout());
        let secret = match &given {
            Some(secret) => Secret::new(secret.0.as_bytes())?,
            None => {
                ensure!(
                    args.servers == 1,
                    "the servers of a cluster need one secret: give each the same --secret-file, or {SECRET_VARIABLE}"
                );
                Secret::random()
            }
        };
        let defaults = VerbsServeOptions::new(secret.clone());
        let options = VerbsServeOptions {
            server: args.server as usize,
            servers: args.servers as usize,
            bytes: args.bytes.unwrap_or(defaults.bytes),
            listen: args.listen.unwrap_or(defaults.listen),
            device: choice(&args.verbs.card),
            ordered: !args.verbs.card.unordered,
            ..defaults
        };
        let server = farlink_runtime::server::serve_verbs(&options, args.records.unwrap_or_default())?;
        let shipping = match args.threads {
            0 => None,
            _ => Some(ship(&server, args, &secret, registry)?),
        };
        if given.is_none() {
            writeln!(out, "{SECRET_VARIABLE}={}", String::from_utf8_lossy(secret.reveal()))?;
        }
        writeln!(out, "farlink server {} listens on verbs://{}", args.server, server.address())?;
        announce_ready(out, args.server)?;
        let ended = signals.wait(|| Ok(server.check()?));
        // Leaves the cluster before its memory goes.
        drop(shipping);
        drop(server);
        Ok(ended?)
    }

    /// Has a server carry out operations. Its threads lock pages through the device, as compute servers do, so they connect to
    /// all servers, this one too.
    fn ship(server: &VerbsServer, args: &ServeArgs, secret: &Secret, registry: Registry) -> Result<ShipServer, Error> {
        let servers = if args.cluster.is_empty() { vec![server.address().to_string()] } else { args.cluster.clone() };
        let options = rdma::options(&servers, &args.verbs.card, secret);
        let listener = server.listen(&serve::listen_options(args.threads))?;
        serve::ship_at(listener, server.memory(), registry, args.lock_wait, move || {
            Ok(Arc::new(VerbsFabric::connect(&options)?))
        })
    }

    /// Lists the RDMA devices.
    pub(crate) fn devices(args: &DevicesArgs) -> anyhow::Result<()> {
        let devices = verbs::devices()?;
        let out = &mut io::stdout();
        if args.json {
            for device in &devices {
                writeln!(out, "{}", row(device))?;
            }
            return Ok(());
        }
        if devices.is_empty() {
            writeln!(out, "there are no RDMA devices; a software one is made by")?;
            writeln!(out, "    modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0")?;
        }
        for device in &devices {
            write!(out, "{}\n{}", device.name, lines(device))?;
        }
        Ok(())
    }

    fn lines(device: &DeviceInfo) -> String {
        let mut lines = String::new();
        let mut row = |what: &str, is: String| lines += &format!("  {what:<28}  {is}\n");
        for port in &device.ports {
            row(&format!("port {}", port.number), describe(port));
            for gid in &port.gids {
                row(&format!("  GID {}", gid.index), format!("{} {}", gid.gid, gid.kind));
            }
        }
        let yes = |yes: bool| if yes { "yes" } else { "no" };
        row("atomics", device.atomics.to_string());
        row("READs and atomics under way", format!("{} out, {} in", device.reads_out_max, device.reads_in_max));
        row("inline", format!("{} bytes", device.inline_bytes));
        row("gather", format!("{} pieces", device.gather_max));
        row("queue depth", format!("{} requests, {} completions", device.queue_depth_max, device.completions_max));
        row("connections", device.queue_pairs_max.to_string());
        row("shared receive queue", yes(device.shared_receive).to_owned());
        row("registration", format!("{} at once", show_bytes(device.registration_bytes_max)));
        lines
    }

    fn describe(port: &PortInfo) -> String {
        let link = if port.ethernet { "Ethernet (RoCE)" } else { "InfiniBand" };
        let hint = match port.state {
            PortState::Active => "",
            _ => "; set its network interface up",
        };
        format!("{}, {link}, packets of {} bytes{hint}", port.state, port.mtu_bytes)
    }

    fn row(device: &DeviceInfo) -> serde_json::Value {
        let gids = |port: &PortInfo| -> Vec<_> {
            let gid = |gid: &verbs::GidInfo| serde_json::json!({ "index": gid.index, "gid": gid.gid.to_string(), "kind": gid.kind });
            port.gids.iter().map(gid).collect()
        };
        let port = |port: &PortInfo| {
            serde_json::json!({
                "port": port.number,
                "state": port.state.to_string(),
                "ethernet": port.ethernet,
                "mtu_bytes": port.mtu_bytes,
                "gids": gids(port),
            })
        };
        serde_json::json!({
            "kind": "device",
            "name": device.name,
            "ports": device.ports.iter().map(port).collect::<Vec<_>>(),
            "atomics": device.atomics.to_string(),
            "reads_out_max": device.reads_out_max,
            "reads_in_max": device.reads_in_max,
            "inline_bytes": device.inline_bytes,
            "gather_max": device.gather_max,
            "queue_depth_max": device.queue_depth_max,
            "completions_max": device.completions_max,
            "queue_pairs_max": device.queue_pairs_max,
            "shared_receive": device.shared_receive,
            "registration_bytes_max": device.registration_bytes_max,
        })
    }
}
