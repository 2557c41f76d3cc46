//! The B+-tree through a compute server's cache: as an owner of keys sees it, and with inner pages cached only.

mod counts;
mod crowd;
mod edges;
mod endings;
mod engines;
mod freed;
mod full;
mod heirs;
mod leaving;
mod loads;
mod logged;
mod models;
mod moving;
mod owners;
mod ownership;
mod readers;
mod renewed;
mod routing;
mod scene;
mod sent;
mod shipped;
mod steps;
mod uses;
mod whole;
