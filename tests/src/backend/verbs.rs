//! Verbs, where they are built in.

#[cfg(feature = "verbs")]
mod built_in {
    use std::{net::Ipv4Addr, sync::Arc};

    use farlink_offload::ship::ShipServer;
    use farlink_runtime::{
        error::Error,
        fabric::{
            Fabric,
            listener::{ListenOptions, Listener},
            verbs::{PortState, Secret, VerbsFabric, VerbsOptions, VerbsServeOptions, VerbsServer, devices},
        },
        layout::Records,
        ptr::ServerId,
        server::LocalMemory,
    };

    use crate::{
        backend::{Members, Place, ServerSpec, fleet, here::Here},
        cluster,
    };

    pub(in crate::backend) fn try_here() -> Result<(), String> {
        let devices = devices().map_err(|error| error.to_string())?;
        let is_active = devices.iter().flat_map(|device| &device.ports).any(|port| port.state == PortState::Active);
        if is_active { Ok(()) } else { Err("there is no RDMA device with an active port".into()) }
    }

    pub(in crate::backend) fn connect(servers: &[String], secret: &str) -> Result<Arc<dyn Fabric>, Error> {
        Ok(Arc::new(VerbsFabric::connect(&VerbsOptions::new(servers, Secret::new(secret)?))?))
    }

    pub(in crate::backend) fn serve(spec: &ServerSpec) -> Result<(VerbsServer, String), Error> {
        let server = start(spec.server, spec.servers, spec.bytes, &spec.secret)?;
        let address = server.address().to_string();
        Ok((server, address))
    }

    fn start(server: usize, servers: usize, bytes: u64, secret: &str) -> Result<VerbsServer, Error> {
        let options = VerbsServeOptions {
            server,
            servers,
            bytes,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            ..VerbsServeOptions::new(Secret::new(secret)?)
        };
        farlink_runtime::server::serve_verbs(&options, Records::All)
    }

    /// Has a memory server carry out operations. It joins the cluster once it has been told who the `members` are.
    pub(in crate::backend) fn ship(
        server: &VerbsServer,
        spec: &ServerSpec,
        members: &Members,
    ) -> Result<ShipServer, Error> {
        let options = ListenOptions { endpoints: spec.threads, ..ListenOptions::default() };
        let listener = spec.profile.wrap_listener(server.listen(&options)?);
        let (members, secret, profile) = (Arc::clone(members), spec.secret.clone(), spec.profile);
        let join = move || {
            let servers = members.get().cloned().unwrap_or_default();
            Ok(Arc::new(cluster::join(&profile.wrap(connect(&servers, &secret)?), 0)?))
        };
        fleet::ship_at(listener, server.memory(), fleet::registry(), join)
    }

    #[derive(Debug)]
    struct OnVerbs {
        // Before the servers that it leads to.
        fabric: Arc<dyn Fabric>,
        servers: Vec<VerbsServer>,
        secret: String,
    }

    impl OnVerbs {
        fn server(&self, server: ServerId) -> Result<&VerbsServer, Error> {
            let why = || format!("there is no memory server {server}");
            self.servers.get(server.index()).ok_or_else(|| Error::BadOption { option: "server", why: why() })
        }
    }

    impl Here for OnVerbs {
        fn fabric(&self) -> Arc<dyn Fabric> {
            self.fabric.clone()
        }

        fn place(&self) -> Option<Place> {
            let servers = self.servers.iter().map(|server| server.address().to_string()).collect();
            Some(Place::Verbs { servers, secret: self.secret.clone() })
        }

        fn listen(&self, server: ServerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
            Ok(self.server(server)?.listen(options)?)
        }

        fn memory(&self, server: ServerId) -> Result<LocalMemory, Error> {
            Ok(self.server(server)?.memory())
        }

        fn break_connections(&self) {
            self.servers.iter().for_each(VerbsServer::break_connections);
        }
    }

    pub(crate) fn start_here(servers: usize, bytes: u64) -> Result<Arc<dyn Here>, Error> {
        let secret = format!("{:032x}", rand::random::<u128>());
        let started = (0..servers).map(|server| start(server, servers, bytes, &secret));
        let servers = started.collect::<Result<Vec<_>, Error>>()?;
        let addresses: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
        Ok(Arc::new(OnVerbs { fabric: connect(&addresses, &secret)?, servers, secret }))
    }
}

#[cfg(not(feature = "verbs"))]
mod built_in {
    use std::sync::Arc;

    use farlink_offload::ship::ShipServer;
    use farlink_runtime::{error::Error, fabric::Fabric};

    use crate::backend::{Members, ServerSpec, here::Here};

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

    pub(in crate::backend) fn ship(server: &Server, _: &ServerSpec, _: &Members) -> Result<ShipServer, Error> {
        match *server {}
    }

    pub(crate) fn start_here(_: usize, _: u64) -> Result<Arc<dyn Here>, Error> {
        Err(Error::BadOption { option: "fabric", why: WHY.into() })
    }
}

pub(crate) use built_in::start_here;
pub(super) use built_in::{connect, serve, ship, try_here};
