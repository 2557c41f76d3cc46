//! What goes wrong when a cluster is opened or served: each has its error, and the error says what to do.

use std::{
    fmt::{Debug, Display},
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use farlink_children::Scratch;
use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{Error as FabricError, mem::MemFabric},
    layout::Records,
    messaging::{Error as MessagingError, Refusal},
    ptr::{RemotePtr, ServerId},
    server::{MemoryServer, ServeOptions, in_process},
    wire::DecodeError,
};
use farlink_tests::cluster::{self, FAST};

const BYTES: u64 = 2 << 20;
const SUPERBLOCK: u64 = 64;

fn options(dir: &Path, server: usize) -> ServeOptions {
    cluster::serve_options(dir, server, 2, BYTES)
}

/// The directory of a cluster of two servers that have stopped.
fn stopped() -> Scratch {
    let dir = cluster::scratch().unwrap();
    drop([0, 1].map(|server| MemoryServer::start(&options(dir.path(), server)).unwrap()));
    dir
}

fn region(dir: &Path, server: usize) -> PathBuf {
    dir.join(format!("server-{server}.mem"))
}

/// Overwrites a word of a server's superblock.
fn overwrite(dir: &Path, server: usize, word: u64, value: u64) {
    let file = OpenOptions::new().write(true).open(region(dir, server)).unwrap();
    file.write_all_at(&value.to_le_bytes(), SUPERBLOCK + word * 8).unwrap();
}

fn start(dir: &Path, server: usize) -> Result<MemoryServer, Error> {
    MemoryServer::start(&options(dir, server))
}

fn join(dir: &Path) -> Result<ComputeServer, Error> {
    ComputeServer::join(std::sync::Arc::new(MemFabric::open(dir, FAST)?), ComputeOptions::default())
}

/// The error, whose message holds all of `words`.
fn says<T: Debug, E: Debug + Display>(result: Result<T, E>, words: &[&str]) -> E {
    let error = result.expect_err("it must fail");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
    println!("{message}");
    error
}

#[test]
fn no_such_directory_and_no_cluster_in_it() {
    let dir = cluster::scratch().unwrap();
    let missing = dir.path().join("missing");
    let error = says(MemFabric::open(&missing, FAST), &["no farlink cluster", "missing", "farlink serve --dir"]);
    assert!(matches!(error, FabricError::NoCluster { path, .. } if path == missing));
    let error = says(MemFabric::open(dir.path(), FAST), &["no farlink cluster", "farlink serve --dir"]);
    assert!(matches!(error, FabricError::NoCluster { .. }));
    fs::write(dir.path().join("cluster"), "something else\n").unwrap();
    let error = says(MemFabric::open(dir.path(), FAST), &["not a cluster file"]);
    assert!(matches!(error, FabricError::NoCluster { .. }));
}

#[test]
fn a_server_that_was_never_started() {
    let dir = cluster::scratch().unwrap();
    let _first = start(dir.path(), 0).unwrap();
    let error = says(MemFabric::open(dir.path(), FAST), &["memory server 1", "not running", "farlink serve"]);
    assert!(matches!(error, FabricError::ServerMissing { server, .. } if server.index() == 1));
}

#[test]
fn a_server_that_has_stopped() {
    let dir = stopped();
    let error = says(MemFabric::open(dir.path(), FAST), &["memory server 0", "not running", "farlink serve"]);
    assert!(matches!(error, FabricError::ServerMissing { server, .. } if server.index() == 0));
    let _first = start(dir.path(), 0).unwrap();
    let error = says(MemFabric::open(dir.path(), FAST), &["memory server 1", "not running"]);
    assert!(matches!(error, FabricError::ServerMissing { server, .. } if server.index() == 1));
    let second = start(dir.path(), 1).unwrap();
    assert!(second.is_resumed());
    join(dir.path()).unwrap();
}

#[test]
fn a_region_of_something_else() {
    let dir = stopped();
    overwrite(dir.path(), 1, 0, 0x1234);
    let error = says(start(dir.path(), 1), &["memory server 1", "magic", "0x0000000000001234"]);
    assert!(matches!(error, Error::BadSuperblock { .. }));
}

#[test]
fn a_region_of_another_version() {
    let dir = stopped();
    overwrite(dir.path(), 0, 1, 99);
    let error = says(start(dir.path(), 0), &["version 99", "use the matching farlink"]);
    assert!(matches!(error, Error::WrongVersion { found: 99, .. }));
}

#[test]
fn a_damaged_superblock_met_by_a_compute_server() {
    let dir = cluster::scratch().unwrap();
    let _servers = [0, 1].map(|server| start(dir.path(), server).unwrap());
    overwrite(dir.path(), 1, 4, 1 << 30);
    let error = says(join(dir.path()), &["memory server 1", "check word", "damaged"]);
    assert!(matches!(error, Error::BadSuperblock { .. }));
    overwrite(dir.path(), 0, 0, 0);
    assert!(matches!(says(join(dir.path()), &["memory server 0", "magic"]), Error::BadSuperblock { .. }));
}

#[test]
fn memory_servers_that_do_not_record_the_same() {
    let dir = cluster::scratch().unwrap();
    let several = ServeOptions { records: Some(Records::SeveralPages), ..options(dir.path(), 1) };
    let servers = (start(dir.path(), 0).unwrap(), MemoryServer::start(&several).unwrap());
    let error = says(join(dir.path()), &["memory server 1", "SeveralPages", "All"]);
    assert!(matches!(error, Error::BadSuperblock { .. }));
    drop(servers);
    let other = ServeOptions { records: Some(Records::All), ..options(dir.path(), 1) };
    let error = says(MemoryServer::start(&other), &["records", "All", "SeveralPages"]);
    assert!(matches!(error, Error::BadOption { option: "records", .. }));
    assert_eq!(start(dir.path(), 1).unwrap().geometry().records, Records::SeveralPages);
}

#[test]
fn a_region_of_another_size() {
    let dir = stopped();
    let grown = ServeOptions { bytes: Some(2 * BYTES), ..options(dir.path(), 0) };
    let error =
        says(MemoryServer::start(&grown), &[&BYTES.to_string(), &(2 * BYTES).to_string(), "leave the option out"]);
    assert!(matches!(error, Error::Fabric(FabricError::BadOption { option: "bytes", .. })));
    // ShardKey by hand, and served as it is.
    OpenOptions::new().write(true).open(region(dir.path(), 1)).unwrap().set_len(BYTES / 2).unwrap();
    let cut = ServeOptions { bytes: None, ..options(dir.path(), 1) };
    let error = says(MemoryServer::start(&cut), &["memory server 1", "cut or grown by hand"]);
    assert!(matches!(error, Error::WrongSize { .. }));
}

#[test]
fn a_region_that_holds_no_superblock() {
    let dir = stopped();
    OpenOptions::new().write(true).open(region(dir.path(), 1)).unwrap().set_len(100).unwrap();
    let cut = ServeOptions { bytes: None, ..options(dir.path(), 1) };
    let error = says(MemoryServer::start(&cut), &["memory server 1", "too few"]);
    assert!(matches!(error, Error::Fabric(FabricError::BadRegion { .. })));
}

#[test]
fn a_region_of_another_cluster() {
    let (dir, other) = (stopped(), stopped());
    fs::copy(region(other.path(), 1), region(dir.path(), 1)).unwrap();
    let error = says(start(dir.path(), 1), &["memory server 1", "do not mix their files"]);
    assert!(matches!(error, Error::Fabric(FabricError::BadRegion { .. })));
}

#[test]
fn files_that_were_renamed() {
    let dir = stopped();
    fs::copy(region(dir.path(), 0), region(dir.path(), 1)).unwrap();
    let error = says(start(dir.path(), 1), &["memory server 1", "renamed or mixed"]);
    assert!(matches!(error, Error::Fabric(FabricError::BadRegion { .. })));
}

#[test]
fn a_server_that_is_served_already() {
    let dir = cluster::scratch().unwrap();
    let _first = start(dir.path(), 0).unwrap();
    let error = says(start(dir.path(), 0), &["memory server 0", "already running", "stop it first"]);
    assert!(matches!(error, Error::Fabric(FabricError::AlreadyServed { .. })));
}

#[test]
fn numbers_that_cannot_work() {
    let scratch = cluster::scratch().unwrap();
    let dir = scratch.path().join("cluster");
    let with = |server, servers, bytes| MemoryServer::start(&cluster::serve_options(&dir, server, servers, bytes));
    for (result, option) in [
        (with(0, 1, 4096), "bytes"),
        (with(0, 1, BYTES + 8), "bytes"),
        (with(2, 2, BYTES), "server"),
        (with(0, 0, BYTES), "servers"),
    ] {
        let error = says(result, &[option]);
        assert!(matches!(error, Error::BadOption { option: named, .. } if named == option), "{error:?}");
    }
    assert!(!dir.exists(), "refused, and yet something was made");
    let _first = with(0, 2, BYTES).unwrap();
    let error = says(with(1, 3, BYTES), &["has 2 memory servers, not 3"]);
    assert!(matches!(error, Error::Fabric(FabricError::BadOption { option: "servers", .. })));
    assert!(matches!(in_process(1, 4096, FAST), Err(Error::BadOption { option: "bytes", .. })));
    assert!(matches!(
        in_process(0, BYTES, FAST)
            .map(|fabric| { ComputeServer::join(std::sync::Arc::new(fabric), ComputeOptions::default()).map(drop) }),
        Ok(Err(Error::BadOption { .. })) | Err(Error::BadOption { .. })
    ));
}

/// A chain as the program prints it: each error's message, then what caused it.
#[test]
fn a_chain_of_errors_states_each_cause_once() {
    let io = || std::io::Error::other("the disk is on fire");
    let fabric = || FabricError::io("opening the region")(io());
    let registration = || FabricError::RegistrationRefused {
        bytes: 64,
        device: "rxe0".into(),
        cause: io(),
        remedy: "raise the limit".into(),
    };
    let server = ServerId::new(0).unwrap();
    let refused = || MessagingError::Refused { server, kind: 7, why: Refusal::UnknownKind };
    for (error, cause) in [
        (Error::Fabric(fabric()), "the disk is on fire"),
        (Error::Fabric(registration()), "the disk is on fire"),
        (Error::Io { what: "starting a thread".into(), cause: io() }, "the disk is on fire"),
        (MessagingError::Fabric(fabric()).into(), "the disk is on fire"),
        (MessagingError::Service(Box::new(fabric())).into(), "the disk is on fire"),
        (refused().into(), "does not know its kind"),
        (DecodeError("it ends too early").into(), "it ends too early"),
        (MessagingError::Malformed(DecodeError("it ends too early")).into(), "it ends too early"),
    ] {
        let printed = format!("{:#}", anyhow::Error::new(error).context("building a tree"));
        assert_eq!(printed.matches(cause).count(), 1, "{printed}");
    }
}

#[test]
fn an_error_is_found_where_it_is_found_without_messages_in_between() {
    let failed = || FabricError::RequestFailed {
        what: "READ",
        at: RemotePtr::new(ServerId::new(0).unwrap(), 64).unwrap(),
        why: "a cable was pulled".into(),
    };
    let error = Error::from(MessagingError::from(failed()));
    assert!(matches!(error, Error::Fabric(FabricError::RequestFailed { .. })) && error.may_be_tried_again());
    assert!(MessagingError::from(failed()).may_be_tried_again());
    let error = Error::from(MessagingError::Service(Box::new(Error::IncarnationsExhausted)));
    assert!(matches!(error, Error::IncarnationsExhausted) && !error.may_be_tried_again());
}
