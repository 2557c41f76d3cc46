//! The example does what it says.
#![cfg(not(any(loom, miri)))]
#![allow(missing_docs, reason = "an example is a program of its own")]

#[path = "../examples/file_store.rs"]
mod file_store;

#[test]
fn the_file_store_keeps_what_it_was_given() {
    file_store::main().unwrap();
}
