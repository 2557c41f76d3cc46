//! `farlink figure`: the numbers and plots of the evaluation, each from one command.
//!
//! `population.rs` says which keys there are, how popular each is (`zipf.rs`) and which compute server owns it. `bed.rs`
//! loads them into a tree, `runner.rs` runs a contender (`contender.rs`) on it and counts remote operations, and
//! `optimum.rs` computes the best that any cache contents could do. `paper.rs` holds what papers report; `rows.rs` and
//! `plot.rs` print. A figure is a module that puts these together: `table2.rs`, `replacement.rs`. `offload/` and `designs/` have beds of their own.

mod args;
mod bed;
mod contender;
mod designs;
mod offload;
mod optimum;
mod paper;
mod plot;
mod population;
mod replacement;
mod rows;
mod runner;
mod table2;
mod zipf;

use std::io;

use self::args::Figure;
pub(crate) use self::args::FigureArgs;

/// `farlink figure`.
pub(crate) fn run(args: &FigureArgs) -> anyhow::Result<()> {
    let out = io::stdout().lock();
    match &args.figure {
        Figure::DexTable2(args) => table2::run(args, out),
        Figure::Replacement(args) => replacement::run(args, out),
        Figure::Offload(args) => offload::run(args, out),
        Figure::FgCgHybrid(args) => designs::run(args, out),
    }
}
