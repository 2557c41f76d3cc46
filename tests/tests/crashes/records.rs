//! What it costs to record a change of one page, and what it costs not to. A change of one word has no record.

use std::sync::Arc;

use farlink_runtime::{
    fabric::Fabric,
    layout::Records,
    one_sided::{OneSided, Proof},
    server,
    worker::Counters,
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::cluster::{self, FAST};

use crate::maps::MAP;

const KEYS: u64 = 100;
/// So few that no leaf is split.
const FEW: u64 = 2;

/// What so many updates cost, and inserts into one leaf.
fn costs(records: Records) -> [Counters; 2] {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process_recording(2, 2 << 20, FAST, records).unwrap());
    let costs = cluster::with_worker(&fabric, |worker| {
        worker.block_on(async {
            let map: Map<Tree, OneSided<Tree>> = Map::make(worker, MAP, 256, Proof::Checksum).await?;
            for key in 0..KEYS {
                map.insert(key, key).await?;
            }
            let before = worker.counters();
            for key in 0..KEYS {
                assert_eq!(map.update(key, key + 1).await?, Some(key));
            }
            let updated = worker.counters();
            for key in 0..FEW {
                assert!(map.insert(KEYS + key, key).await?);
            }
            let costs = [updated - before, worker.counters() - updated];
            assert!(map.check().await?.is_clean());
            Ok::<_, farlink_runtime::error::Error>(costs)
        })
    });
    costs.unwrap()
}

#[test]
fn to_record_a_change_of_one_page_takes_a_write_and_no_round_trip() {
    let [all, several] = Records::CHOICES.map(costs);
    assert_eq!(all[0], several[0], "an update is a change of one word");
    assert_eq!(all[0].writes, 3 * KEYS);
    assert_eq!(all[1].writes, several[1].writes + FEW);
    let others = |cost: Counters| (cost.reads, cost.atomics, cost.round_trips, cost.two_sided);
    assert_eq!(others(all[1]), others(several[1]));
}
