//! Verbs, where they are built in.

#[cfg(feature = "verbs")]
mod built_in {
    use std::{net::Ipv4Addr, sync::Arc};

    use farlink_runtime::{
        error::Error,
        fabric::{
            Fabric,
            verbs::{PortState, Secret, VerbsFabric, VerbsOptions, VerbsServeOptions, VerbsServer, devices},
        },
    };

    use crate::backend::ServerSpec;

    pub(in crate::backend) fn try_here() -> Result<(), String> {
        let devices = devices().map_err(|error| error.to_string())?;
        let is_active = devices.iter().flat_map(|device| &device.ports).any(|port| port.state == PortState::Active);
        if is_active { Ok(()) } else { Err("there is no RDMA device with an active port".into()) }
    }

    pub(in crate::backend) fn connect(servers: &[String], secret: &str) -> Result<Arc<dyn Fabric>, Error> {
        Ok(Arc::new(VerbsFabric::connect(&VerbsOptions::new(servers, Secret::new(secret)?))?))
    }

    pub(in crate::backend) fn serve(spec: &ServerSpec) -> Result<(VerbsServer, String), Error> {
        let server = VerbsServer::start(&VerbsServeOptions {
            server: spec.server,
            servers: spec.servers,
            bytes: spec.bytes,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            ..VerbsServeOptions::new(Secret::new(spec.secret.as_str())?)
        })?;
        let address = server.address().to_string();
        Ok((server, address))
    }
}

#[cfg(not(feature = "verbs"))]
mod built_in {
    use std::sync::Arc;

    use farlink_runtime::{error::Error, fabric::Fabric};

    use crate::backend::ServerSpec;

    const WHY: &str = "built without the feature `verbs`";

    #[derive(Debug)]
    pub(in crate::backend) enum Server {}

    pub(in crate::backend) fn try_here() -> Result<(), String> {
        Err(WHY.into())
    }

    pub(in crate::backend) fn connect(_: &[String], _: &str) -> Result<Arc<dyn Fabric>, Error> {
        Err(Error::BadOption { option: "fabric", why: WHY.into() })
    }

    pub(in crate::backend) fn serve(_: &ServerSpec) -> Result<(Server, String), Error> {
        Err(Error::BadOption { option: "fabric", why: WHY.into() })
    }
}

pub(super) use built_in::{connect, serve, try_here};
