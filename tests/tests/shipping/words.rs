//! Single words of pages, as latch-free structures use them, in operations that run below a page: within the memory server that
//! the operation was sent to, and no farther.

use std::{sync::Arc, time::Duration};

use farlink_offload::ship::{Answer, Decline, From, Registry, ShipOptions, ShipServer, Shipper};
use farlink_runtime::{
    access::{Access, Interrupt, Start},
    fabric::listener::ListenOptions,
    operation::{Code, Operation},
    ptr::{RemotePtr, ServerId},
    server::in_process,
    structure::{Layout, Spread},
    wire::{DecodeError, Wire},
};
use farlink_structures::{
    btree::{BTree, BTreeLayout, BTreeOptions},
    map::KeyRange,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST},
};

/// Replaces a word, or only loads it.
#[derive(Debug, Clone)]
struct Word {
    at: RemotePtr,
    swap: Option<(u64, u64)>,
}

impl Wire for Word {
    fn encode(&self, to: &mut Vec<u64>) {
        self.at.encode(to);
        self.swap.map(|(old, _)| old).encode(to);
        self.swap.map(|(_, new)| new).encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let at = RemotePtr::decode(from)?;
        let (old, new) = (Option::decode(from)?, Option::decode(from)?);
        Ok(Self { at, swap: old.zip(new) })
    }
}

impl Operation for Word {
    type Output = u64;
    type Layout = BTreeLayout;
    const CODE: Code = Code { structure: 1, operation: 99 };

    fn begins(&self) -> Option<<BTreeLayout as Layout>::Region> {
        None
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        access.enter(from).await?;
        match self.swap {
            Some((old, new)) => access.compare_swap(self.at, old, new).await,
            None => access.load(self.at).await,
        }
    }
}

#[test]
fn words_of_other_servers_are_left_alone() {
    let _watch = Watchdog::start("words", Duration::from_secs(60));
    let fabric = Arc::new(in_process(2, 8 << 20, FAST).unwrap());
    let mut registry = Registry::new();
    registry.add::<Word>();
    let start = |server: u16| {
        let (server, joining) = (ServerId::new(server).unwrap(), Arc::clone(&fabric));
        let listener = fabric.listen(server, &ListenOptions::default()).unwrap();
        let join = move || Ok(Arc::new(cluster::join_manual(&(joining.clone() as Arc<_>), 0)?));
        let memory = fabric.memory(server).unwrap();
        ShipServer::start(listener, memory, registry.clone(), &ShipOptions::default(), join).unwrap()
    };
    let _serving = [start(0), start(1)];
    let compute = cluster::join(&(fabric.clone() as Arc<_>), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let on = async |server, name| {
            let options =
                BTreeOptions { spread: Spread::OneServer, root: ServerId::new(server), ..BTreeOptions::default() };
            BTree::create(&worker, name, options).await.unwrap().structure().clone()
        };
        let (here, elsewhere) = (on(0, "here").await, on(1, "elsewhere").await);
        let shipper = Shipper::new(&worker, here.clone());
        let ship = async |operation: &Word| {
            let from = From::Page { page: here.root, level: 0, owned: &KeyRange::ALL };
            match shipper.ship(operation, from).await.unwrap() {
                Answer::Done(shipped) => Ok(shipped.output),
                Answer::Declined(why) => Err(why),
            }
        };
        // The last word of a leaf, which has no meaning here.
        let last = |root: RemotePtr| root.add(here.class.bytes() as u64 - 8).unwrap();
        let (at, away) = (last(here.root), last(elsewhere.root));
        assert_eq!(ship(&Word { at, swap: None }).await, Ok(0));
        assert_eq!(ship(&Word { at: away, swap: None }).await, Err(Decline::Leaves));
        assert_eq!(ship(&Word { at: away, swap: Some((0, 7)) }).await, Err(Decline::Leaves));
        assert_eq!(worker.load(away).await.unwrap(), 0);
        // Last, for the leaf's checksum does not fit then.
        assert_eq!(ship(&Word { at, swap: Some((0, 7)) }).await, Ok(0));
        assert_eq!(worker.load(at).await.unwrap(), 7);
    });
}
