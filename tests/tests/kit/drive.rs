use std::{
    cell::Cell,
    future::{Future, ready},
    rc::Rc,
    sync::Arc,
};

use farlink_runtime::{access::Operation, error::Error, fabric::Fabric, operation::Run, ptr::RemotePtr, server};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    cluster,
    drive::{Plan, Tides, drive},
    history::{Flush, Recorder},
    workload::{Mix, Part, Workload, WorkloadSpec, spread_keys},
};

/// What it was asked has happened or has not, whatever it was.
#[derive(Clone)]
struct NeverSure;

impl Run for NeverSure {
    type Plugin = Tree;

    fn execute<O: Operation<Plugin = Tree>>(&self, _: &O) -> impl Future<Output = Result<O::Output, Error>> {
        ready(Err(Error::InstallUnknown { word: RemotePtr::from_raw(64).unwrap() }))
    }
}

#[test]
fn control_who_never_recovers_from_a_failure_is_noticed() {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 1 << 20, cluster::FAST).unwrap());
    let spec = WorkloadSpec { seed: 1, keys: spread_keys(10), theta: 0.0, mix: Mix::ALL, scan_limit_max: 2 };
    let plan = Plan {
        in_flight: 2,
        drop_one_in: 0,
        damage_expected: false,
        failures_expected: true,
        tides: Tides::NONE,
        part: Part::ALL,
    };
    let recorder = Rc::new(Recorder::new(Vec::new(), 1, Flush::WhenFull).unwrap());
    let asked = Cell::new(0);
    let stop = move |_| asked.replace(asked.get() + 1) > 10;
    let driven = cluster::with_worker(&fabric, |worker| {
        let workload = Workload::new(&spec, 1).unwrap();
        Ok::<_, Error>(drive(worker, &Map::over(NeverSure), workload, &recorder, plan, stop))
    });
    let error = driven.unwrap().unwrap_err().to_string();
    assert!(error.contains("none has succeeded"), "{error}");
}
