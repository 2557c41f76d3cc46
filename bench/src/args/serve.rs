//! The options of a memory server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args, ValueEnum, value_parser};
use farlink_runtime::layout::Records;

use crate::place::{VERBS_OPTIONS, VerbsArgs};
use crate::units::{parse_bytes, parse_duration};

/// How memory is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FabricChoice {
    /// Through files that all map.
    Mem,
    /// Over RDMA.
    Verbs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// How compute servers reach the memory: mapped, from this machine, or over RDMA.
    #[arg(long, value_enum, default_value = "mem")]
    pub(crate) fabric: FabricChoice,
    /// With mem: the cluster's folder, the same for all its servers.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// With verbs: where compute servers connect to, ADDRESS:PORT; only from this machine unless told otherwise
    /// (127.0.0.1:7471).
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) verbs: VerbsArgs,
    /// This server's number, from 0.
    #[arg(long, default_value_t = 0)]
    pub(crate) server: u32,
    /// How many servers the cluster has.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=256))]
    pub(crate) servers: u32,
    /// Memory to give: 64MiB, 1GiB. Without it, what an earlier run of this server left, else 1 GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) bytes: Option<u64>,
    /// Remove this server's memory when it stops.
    #[arg(long)]
    pub(crate) ephemeral: bool,
    /// Threads that carry out operations which compute servers send; without them it only gives memory.
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u32).range(..=256))]
    pub(crate) threads: u32,
    /// With --threads: how long an operation waits for a page that is locked by a compute server which does not go on, as 5s; then
    /// it fails, and says whom it waited for. Without it, until that one goes on.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) lock_wait: Option<Duration>,
    /// Which changes of pages compute servers record first, so that others can finish them; the same for all servers of a cluster.
    /// Without it, what an earlier run of this server says, else all.
    #[arg(long, value_parser = crate::by_name::records())]
    pub(crate) records: Option<Records>,
    /// With verbs, --threads and several servers: where all of them are, this one too. Its threads use them.
    #[arg(long, value_name = "HOST:PORT[,HOST:PORT...]", value_delimiter = ',')]
    pub(crate) cluster: Vec<String>,
}

impl ServeArgs {
    /// What clap cannot see by itself.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        ensure!(
            self.server < self.servers,
            "--server {} is not one of the {} servers; they are numbered from 0",
            self.server,
            self.servers
        );
        ensure!(
            self.threads > 0 || self.lock_wait.is_none(),
            "--lock-wait is for operations that this server carries out: give it --threads"
        );
        match self.fabric {
            FabricChoice::Mem => {
                ensure!(
                    self.listen.is_none() && !self.verbs.is_given() && self.cluster.is_empty(),
                    "{VERBS_OPTIONS}, --listen and --cluster are for --fabric verbs"
                );
                ensure!(self.dir.is_some(), "--dir is missing: the cluster's folder, the same for all its servers");
            }
            FabricChoice::Verbs => {
                ensure!(
                    self.dir.is_none() && !self.ephemeral,
                    "--dir and --ephemeral are for --fabric mem; memory that is served over RDMA goes with its server"
                );
                ensure!(
                    self.threads == 0 || self.servers == 1 || !self.cluster.is_empty(),
                    "--cluster is missing: the threads of one of several servers must know where all of them are"
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::args::{Cli, Command};

    #[test]
    fn servers_are_numbered_from_zero() {
        let parse = |args: &str| match Cli::try_parse_from(["farlink", "serve"].into_iter().chain(args.split(' ')))
            .unwrap()
            .command
        {
            Command::Serve(args) => args.validate(),
            other => panic!("{other:?}"),
        };
        assert!(parse("--dir d --server 1 --servers 2 --bytes 1GiB --ephemeral").is_ok());
        assert!(parse("--fabric verbs --listen 127.0.0.1:0 --device rxe0 --port 2 --unordered").is_ok());
        assert!(parse("--fabric verbs --threads 2").is_ok());
        assert!(parse("--fabric verbs --threads 2 --servers 2 --cluster a:1,b:1").is_ok());
        for (args, says) in [
            ("--server 0", "--dir is missing"),
            ("--dir d --listen 127.0.0.1:0", "for --fabric verbs"),
            ("--fabric verbs --dir d", "for --fabric mem"),
            ("--dir d --cluster a:1", "for --fabric verbs"),
            ("--dir d --port 1", "for --fabric verbs"),
            ("--dir d --unordered", "for --fabric verbs"),
            ("--fabric verbs --servers 2 --threads 1", "--cluster is missing"),
        ] {
            assert!(parse(args).unwrap_err().to_string().contains(says), "{args}");
        }
        assert!(parse("--dir d --server 2 --servers 2 --bytes 1GiB").unwrap_err().to_string().contains("from 0"));
    }
}
