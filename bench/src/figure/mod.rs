//! `farlink figure`: the numbers and plots of the evaluation, each from one command.
//!
//! `test_bed.rs` has memory servers in this process, `load.rs` runs compute servers on them, over the driver that a bench uses, and
//! every figure reports the rows of a bench; `rows.rs` says what they say beyond those. `key_set.rs` says which keys there are
//! and who owns them, `trial.rs` runs mixes of DEX on them. `table2.rs`, `ablation.rs`, `admission.rs`, `replacement.rs`, over `moving.rs` `repartition.rs`, `offload.rs`, `designs.rs`, `rtree.rs`, `rtree_map.rs` and, over
//! `spatial.rs`, `rtree_local.rs` and, over `card.rs`, `chains.rs` and `transmit.rs`, `to_copy.rs` are the figures; `optimum.rs` computes the best that any cache contents could do, `paper.rs`
//! holds what papers report, `plot.rs` draws.

mod ablation;
mod admission;
mod args;
mod card;
mod chains;
mod designs;
mod key_set;
mod load;
mod moving;
mod offload;
mod optimum;
mod paper;
mod plot;
mod repartition;
mod replacement;
mod rows;
mod rtree;
#[cfg(feature = "peers")]
mod rtree_local;
mod rtree_map;
#[cfg(feature = "peers")]
mod spatial;
mod table2;
mod test_bed;
mod to_copy;
mod transmit;
mod trial;

use std::io;

use self::args::Figure;
pub(crate) use self::args::FigureArgs;

/// `farlink figure`.
pub(crate) fn run(args: &FigureArgs) -> anyhow::Result<()> {
    let out = io::stdout().lock();
    match &args.figure {
        Figure::DexTable2(args) => table2::run(args, out),
        Figure::DexAblation(args) => ablation::run(args, out),
        Figure::DexAdmission(args) => admission::run(args, out),
        Figure::DexRepartition(args) => repartition::run(args, out),
        Figure::Replacement(args) => replacement::run(args, out),
        Figure::Offload(args) => offload::run(args, out),
        Figure::FgCgHybrid(args) => designs::run(args, out),
        Figure::ToCopy(args) => to_copy::run(args, out),
        Figure::RtreeMap(args) => rtree_map::run(args, out),
        Figure::Rtree(args) => rtree::run(args, out),
        #[cfg(feature = "peers")]
        Figure::RtreeLocal(args) => {
            if args.huge_pages {
                farlink_children::huge_pages::for_all();
            }
            rtree_local::run(args, out)
        }
    }
}
