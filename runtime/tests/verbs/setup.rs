//! How connections are made, and made again.

use farlink_runtime::fabric::Verb;

use crate::scene::{self, FREE, Wire, at, connect, eventually, serve};

#[test]
fn an_endpoint_connects_breaks_connects_again_and_leaves_nothing() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wires = [(); 3].map(|()| Wire::new(&fabric));
    assert_eq!(server.queue_pairs(), 3);
    for (number, wire) in wires.iter_mut().enumerate() {
        let slot = at(0, FREE + number as u64 * 8);
        wire.write(slot, &[number as u64]).unwrap();
        assert_eq!(wire.compare_swap(slot, number as u64, 9).unwrap(), number as u64);
        assert_eq!(wire.read(slot, 1).unwrap(), [9]);
    }
    server.break_connections();
    let mut failures = 0;
    eventually("it connects again", || {
        let outcome = wires[0].one(at(0, FREE), Verb::WriteWord(7));
        failures += u32::from(outcome.is_err());
        outcome.is_ok()
    });
    assert!(failures > 0, "the break went unnoticed");
    assert_eq!(wires[0].read(at(0, FREE), 1).unwrap(), [7]);
    drop(wires);
    assert_eq!(server.queue_pairs(), 0);
}
