//! Counts the words of its arguments on a memory server that carries out the operations.

use std::{error::Error, sync::Arc};

use counter_set::{Add, CounterSet, Total, create, name};
use farlink_offload::{
    Remote,
    ship::{Registry, ShipOptions, ShipServer},
};
use farlink_runtime::{
    access::Access,
    compute::{ComputeOptions, ComputeServer},
    fabric::{listener::ListenOptions, mem::MemOptions},
    operation::Run,
    ptr::ServerId,
    server,
    structure::{PlacementPolicy, StructurePlacement},
};

fn main() -> Result<(), Box<dyn Error>> {
    let fabric = Arc::new(server::in_process(1, 16 << 20, MemOptions::default())?);
    let (here, joining) = (ServerId::new(0).ok_or("0 is a server id")?, Arc::clone(&fabric));
    let _serving = ShipServer::start(
        fabric.listen(here, &ListenOptions::default())?,
        fabric.memory(here)?,
        Registry::new().with::<CounterSet>(),
        &ShipOptions::default(),
        move || Ok(Arc::new(ComputeServer::join(joining.clone(), ComputeOptions::default())?)),
    )?;
    let compute = ComputeServer::join(fabric, ComputeOptions::default())?;
    let worker = compute.worker()?;
    worker.block_on(async {
        let made =
            create(&worker, "words", StructurePlacement { policy: PlacementPolicy::OneServer, root: Some(here) })
                .await?;
        let words = Remote::<CounterSet>::new(&worker, made.context().structure.clone());
        for word in std::env::args().skip(1) {
            let name = name(&word).ok_or("a word has 16 bytes at most")?;
            println!("{word}: {}", words.execute(&Add { name, amount: 1 }).await?);
        }
        println!("{} words", words.execute(&Total {}).await?);
        Ok(())
    })
}
