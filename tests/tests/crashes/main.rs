//! A compute server dies after each request of an operation, in turn: what others find is whole, every operation that was
//! acknowledged is there, and no page is lost.

mod catalog;
mod deaths;
mod full;
mod loads;
mod maps;
mod owners;
mod parting;
mod records;
mod rings;
mod rtrees;
mod shared;
mod shipped;
mod sweep;
mod taking;
mod ways;
