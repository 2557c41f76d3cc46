//! Where a cluster is: in a folder, or at memory servers that are reached over RDMA.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error as RuntimeError;
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::fabric::{Error as FabricError, Fabric};
use serde::{Deserialize, Serialize};

use crate::rdma::{self, CardArgs};
use crate::units::parse_duration_or_zero;

/// Names the secret where no file does.
pub(crate) const SECRET_VARIABLE: &str = "FARLINK_SECRET";
const SCHEME: &str = "verbs://";
/// How often it is looked whether memory servers are ready.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How the error for memory begins that no server has formatted yet.
const NO_MAGIC: &str = "the magic number is 0x0000000000000000,";

/// What `--connect` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// The folder of memory servers on this machine.
    Folder(PathBuf),
    /// `HOST:PORT` of all memory servers, over RDMA.
    Verbs(Vec<String>),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(servers) = text.strip_prefix(SCHEME) else {
            return match text.split_once("://") {
                Some((scheme, _)) => {
                    Err(format!("`{scheme}://` is not known; give a folder, or {SCHEME}HOST:PORT[,HOST:PORT...]"))
                }
                None => Ok(Self::Folder(text.into())),
            };
        };
        let servers: Vec<String> = servers.split(',').map(str::to_owned).collect();
        let is_server = |server: &String| {
            server.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        match servers.iter().find(|server| !is_server(server)) {
            Some(wrong) => Err(format!("`{wrong}` is not HOST:PORT, as in {SCHEME}127.0.0.1:7471")),
            None => Ok(Self::Verbs(servers)),
        }
    }
}

/// A running cluster, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct ConnectArgs {
    /// The running cluster: its folder, or verbs://HOST:PORT[,HOST:PORT...] over RDMA.
    #[arg(long, value_name = "DIR|verbs://...")]
    pub(crate) connect: Address,
    #[command(flatten)]
    pub(crate) verbs: VerbsArgs,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

impl ConnectArgs {
    /// The cluster, and the way to it.
    pub(crate) fn open(&self) -> anyhow::Result<Arc<dyn Fabric>> {
        Place::new(&self.connect, &self.verbs)?.fabric_once_ready(MemOptions::default(), self.wait.wait)
    }
}

/// How patient to be.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct WaitArgs {
    /// How long to wait for memory servers that are not ready yet.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration_or_zero)]
    pub(crate) wait: Duration,
}

/// How to use RDMA here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(crate) struct VerbsArgs {
    #[command(flatten)]
    pub(crate) card: CardArgs,
    /// A file with the cluster's secret, which all its servers must know. Without it, the variable FARLINK_SECRET.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

/// Names [`VerbsArgs`] in messages.
pub(crate) const VERBS_OPTIONS: &str = "--device, --port, --gid-index, --unordered and --secret-file";

impl VerbsArgs {
    pub(crate) fn is_given(&self) -> bool {
        *self != Self::default()
    }

    /// The secret that a file or the environment holds.
    pub(crate) fn secret(&self) -> anyhow::Result<Option<SharedSecret>> {
        if let Some(path) = &self.secret_file {
            require_private(path)?;
            let text =
                std::fs::read_to_string(path).with_context(|| format!("reading the secret from {}", path.display()))?;
            return Ok(Some(SharedSecret(text.trim().to_owned())));
        }
        match std::env::var(SECRET_VARIABLE) {
            Ok(text) => Ok(Some(SharedSecret(text.trim().to_owned()))),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(error) => Err(error).context(SECRET_VARIABLE),
        }
    }
}

/// Whether a file is its user's alone, if it is a file; what the shell makes of `<(command)` is a pipe.
fn require_private(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let what = std::fs::metadata(path).with_context(|| format!("reading the secret from {}", path.display()))?;
    let mode = what.permissions().mode();
    ensure!(
        !what.is_file() || mode & 0o077 == 0,
        "others can read the secret in {} (its mode is {:o}); `chmod 600` it",
        path.display(),
        mode & 0o7777
    );
    Ok(())
}

/// A cluster's secret, never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedSecret(pub(crate) String);

impl fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedSecret(..)")
    }
}

/// A cluster, with all that it takes to reach it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Place {
    Folder(PathBuf),
    Verbs { servers: Vec<String>, card: CardArgs, secret: SharedSecret },
}

impl Place {
    /// The cluster at `address`.
    pub(crate) fn new(address: &Address, verbs: &VerbsArgs) -> anyhow::Result<Self> {
        match address {
            Address::Folder(dir) => {
                ensure!(
                    !verbs.is_given(),
                    "{VERBS_OPTIONS} are for a cluster that is reached over RDMA: --connect {SCHEME}HOST:PORT"
                );
                Ok(Self::Folder(dir.clone()))
            }
            Address::Verbs(servers) => {
                let secret = verbs.secret()?.with_context(|| {
                    format!(
                        "the cluster's secret is missing: give --secret-file, or set {SECRET_VARIABLE} to what \
                         `farlink serve` was given or has printed"
                    )
                })?;
                Ok(Self::Verbs { servers: servers.clone(), card: verbs.card.clone(), secret })
            }
        }
    }

    /// [`Place::fabric`], once all memory servers are ready; waits so long for them.
    pub(crate) fn fabric_once_ready(&self, options: MemOptions, wait: Duration) -> anyhow::Result<Arc<dyn Fabric>> {
        let deadline = Instant::now() + wait;
        loop {
            let opened = self.fabric(options).and_then(|fabric| {
                // Reads every superblock.
                drop(ComputeServer::join(Arc::clone(&fabric), ComputeOptions::default())?);
                Ok(fabric)
            });
            match opened {
                Err(error) if is_not_ready(&error) && Instant::now() < deadline => thread::sleep(LOOK_EVERY),
                opened => return opened,
            }
        }
    }

    /// The way to it. `options` are for memory that this process maps.
    pub(crate) fn fabric(&self, options: MemOptions) -> anyhow::Result<Arc<dyn Fabric>> {
        match self {
            Self::Folder(dir) => Ok(Arc::new(MemFabric::open(dir, options)?)),
            Self::Verbs { servers, card, secret } => rdma::fabric(servers, card, &secret.0),
        }
    }
}

/// Whether an error is one of memory servers that are about to be ready.
fn is_not_ready(error: &anyhow::Error) -> bool {
    let fabric = match error.downcast_ref::<RuntimeError>() {
        // The magic number is written last.
        Some(RuntimeError::BadSuperblock { why, .. }) => return why.starts_with(NO_MAGIC),
        Some(RuntimeError::Fabric(error)) => Some(error),
        _ => error.downcast_ref::<FabricError>(),
    };
    match fabric {
        Some(FabricError::NoCluster { .. } | FabricError::ServerMissing { .. } | FabricError::BadRegion { .. }) => true,
        Some(FabricError::Io { cause, .. }) => cause.kind() == std::io::ErrorKind::ConnectionRefused,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("/tmp/c".parse(), Ok(Address::Folder("/tmp/c".into())));
        let two = Address::Verbs(vec!["10.0.0.1:7471".into(), "[::1]:7".into()]);
        assert_eq!("verbs://10.0.0.1:7471,[::1]:7".parse(), Ok(two));
        for (text, says) in [
            ("verbs://", "`` is not HOST:PORT"),
            ("verbs://host", "`host` is not HOST:PORT"),
            ("verbs://host:70000", "not HOST:PORT"),
            ("verbs://a:1,", "`` is not HOST:PORT"),
            ("tcp://a:1", "`tcp://` is not known"),
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn secrets_come_from_files_and_are_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "  0123456789abcdef\n").unwrap();
        let args = VerbsArgs { secret_file: Some(path.clone()), ..VerbsArgs::default() };
        let of_mode = |mode| {
            use std::os::unix::fs::PermissionsExt as _;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        of_mode(0o640);
        let error = Place::new(&Address::Verbs(vec!["a:1".into()]), &args).unwrap_err().to_string();
        assert!(error.contains("others can read the secret") && error.contains("640"), "{error}");
        of_mode(0o600);
        let place = Place::new(&Address::Verbs(vec!["a:1".into()]), &args).unwrap();
        let Place::Verbs { secret, .. } = &place else { panic!("{place:?}") };
        assert_eq!(secret.0, "0123456789abcdef");
        assert!(!format!("{place:?}").contains("0123"));
        assert!(Place::new(&Address::Folder("d".into()), &args).is_err());
        let args = VerbsArgs { secret_file: Some(folder.path().join("absent")), ..args };
        assert!(Place::new(&Address::Verbs(vec!["a:1".into()]), &args).is_err());
    }
}
