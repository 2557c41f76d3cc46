//! What engines learn: each of those that share an access, and also of what comes back.

use std::{cell::Cell, rc::Rc};

use farlink_offload::{
    Admission, CacheOptions, ComputeCache, Engine, EngineOptions, Policies,
    policy::{Choice, Miss, Policy},
};
use farlink_runtime::ptr::ServerId;
use farlink_structures::btree::{BTree, KeyRange, Tree};
use farlink_tests::backend::FabricProfile;

use crate::scene::{CACHE_BYTES_MIN, Member, fabric, sparse};

/// Counts the reads that it is told of.
#[derive(Debug, Clone, Default)]
struct Counting(Rc<Cell<u64>>);

impl Policy for Counting {
    fn choose(&mut self, _: &Miss<'_>) -> Choice {
        Choice::FETCH
    }

    fn fetched(&mut self, _server: ServerId, _took_ns: u64) {
        self.0.set(self.0.get() + 1);
    }
}

/// The second one of an access is told as the first, and goes on to be when that is gone.
#[test]
fn each_engine_of_an_access_is_told_what_reads_take() {
    let model = sparse(5000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let member = Member::join(&fabric, 1);
    let mut options = CacheOptions::new(CACHE_BYTES_MIN);
    (options.page_bytes, options.admission, options.excludes_subtrees) = (256, Admission::Always, true);
    let cache = ComputeCache::<Tree>::new(options).unwrap();
    let owned = cache.own(&member.worker, member.tree.structure().clone(), KeyRange::ALL);
    let owned = member.worker.block_on(owned).unwrap();
    let told = [Counting::default(), Counting::default()];
    let [first, second] = told.each_ref().map(|policy| {
        let policies = Policies::new(policy.clone());
        BTree::over(Engine::new(owned.clone(), policies, EngineOptions::default()).unwrap())
    });
    let read = |tree: &BTree<Engine<Tree>>| {
        member.worker.block_on(async {
            for &key in model.keys().step_by(10) {
                assert_eq!(tree.get(key).await.unwrap(), Some(model[&key]));
            }
        });
    };
    read(&first);
    read(&second);
    let counts = told.each_ref().map(|policy| policy.0.get());
    assert!(counts[0] > 100 && counts[0] == counts[1], "{counts:?}");
    drop(first);
    read(&second);
    assert!(told[0].0.get() == counts[0] && told[1].0.get() > counts[1], "{told:?}");
}
