//! Memory servers that start at the same time as others start or stop.

use std::{path::Path, sync::Arc, thread};

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::mem::MemFabric,
    server::{MemoryServer, ServeOptions},
};
use farlink_tests::cluster::{self, FAST};

const BYTES: u64 = 1 << 20;

fn join(dir: &Path) -> Result<ComputeServer, Error> {
    ComputeServer::join(Arc::new(MemFabric::open(dir, FAST)?), ComputeOptions::default())
}

#[test]
fn servers_that_start_at_once_agree_on_the_cluster() {
    const SERVERS: usize = 4;
    for round in 0..300 {
        let scratch = cluster::scratch().unwrap();
        let dir = scratch.path().join("cluster");
        let barrier = std::sync::Barrier::new(SERVERS);
        let start = |server| {
            barrier.wait();
            MemoryServer::start(&cluster::serve_options(&dir, server, SERVERS, BYTES))
        };
        let servers: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..SERVERS).map(|server| scope.spawn(move || start(server))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let servers: Vec<_> =
            servers.into_iter().map(|server| server.unwrap_or_else(|error| panic!("round {round}: {error}"))).collect();
        let first = servers[0].geometry().cluster;
        assert!(servers.iter().all(|server| server.geometry().cluster == first), "round {round}: {servers:?}");
        join(&dir).unwrap();
    }
}

#[test]
fn a_server_that_restarts_while_its_region_is_removed() {
    let mut started = 0;
    for round in 0..200 {
        let scratch = cluster::scratch().unwrap();
        let dir = scratch.path().join("cluster");
        let options = ServeOptions { ephemeral: true, ..cluster::serve_options(&dir, 0, 1, BYTES) };
        let first = MemoryServer::start(&options).unwrap();
        let barrier = std::sync::Barrier::new(2);
        let second = thread::scope(|scope| {
            let second = scope.spawn(|| {
                barrier.wait();
                MemoryServer::start(&options)
            });
            barrier.wait();
            // Somewhere on the way of the other, another place each time.
            (0..round * 50).for_each(|_| std::hint::spin_loop());
            drop(first);
            second.join().unwrap()
        });
        // It may find the directory gone under its feet, and say so. If it runs, then it serves what others can open.
        match second {
            Ok(second) => {
                started += 1;
                assert!(dir.join("server-0.mem").exists(), "round {round}: serves a file that is gone");
                join(&dir).unwrap_or_else(|error| panic!("round {round}: {error}"));
                drop(second);
            }
            Err(error) => println!("round {round}: {error}"),
        }
    }
    assert!(started > 0, "never started anew");
}

/// A memory server that was killed while it formatted its region, and had all but the magic number.
#[test]
fn a_region_that_was_not_formatted_to_the_end_is_formatted_anew() {
    use std::os::unix::fs::FileExt;
    const SUPERBLOCK: u64 = 64;
    const NEXT_INCARNATION: u64 = 192;
    let scratch = cluster::scratch().unwrap();
    let dir = scratch.path().join("cluster");
    let options = cluster::serve_options(&dir, 0, 1, BYTES);
    let cut = || {
        let file = std::fs::OpenOptions::new().write(true).open(dir.join("server-0.mem")).unwrap();
        file.write_all_at(&[0; 8], SUPERBLOCK).unwrap();
        file
    };
    drop(MemoryServer::start(&options).unwrap());
    cut();
    let server = MemoryServer::start(&options).unwrap();
    assert!(!server.is_resumed());
    join(&dir).unwrap();
    drop(server);
    assert!(MemoryServer::start(&options).unwrap().is_resumed());
    // What somebody has used was formatted: there may be data.
    cut().write_all_at(&2u64.to_le_bytes(), NEXT_INCARNATION).unwrap();
    let refused = MemoryServer::start(&options);
    assert!(matches!(refused, Err(Error::BadSuperblock { .. })), "{refused:?}");
}
