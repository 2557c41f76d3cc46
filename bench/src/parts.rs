//! Parts of a divided structure, each a structure of its own: what the catalog says of them.
//!
//! The keys that a structure is made for decide where it is cut. A later run may have other keys, or a trace none, and must go by the
//! same cut: it would else look for a key in one part that is in another one. So the options of each part, after those of the plug-in,
//! say how many parts there are, and which region this one has.

use anyhow::{bail, ensure};
use farlink_offload::ShardKey;
use farlink_runtime::structure::{OPTIONS, Region, Structure};

use crate::plan::Plan;
use crate::route;
use crate::subject::Subject;

/// Tells the first of these options from those of a structure that is no part.
const TAG: u64 = 0x7061_7274 << 32;
/// As many as there are memory servers, or owners.
const COUNT_MAX: usize = 256;
/// Where they begin: no plug-in here has more options of its own.
const COUNT: usize = 1;
const REGION: usize = COUNT + 1;

/// The words of a region, where the options have room for them.
fn words<R: Region>(region: &R) -> Option<Vec<u64>> {
    let mut words = Vec::new();
    region.encode(&mut words);
    (words.len() <= OPTIONS - REGION).then_some(words)
}

/// The options of the part with this number.
pub(crate) fn options<R: Region>(cut: &ShardKey<R>, part: usize) -> [u64; OPTIONS] {
    let mut options = [0; OPTIONS];
    let region = match cut {
        ShardKey::Regions(regions) => regions.get(part).and_then(words),
        ShardKey::Hash(_) => Some(Vec::new()),
    };
    if let Some(region) = region {
        options[COUNT] = TAG | cut.parts() as u64;
        options[REGION..][..region.len()].copy_from_slice(&region);
    }
    options
}

/// How many parts there are of the structure of which this is one.
pub(crate) fn count(part: &Structure) -> Option<usize> {
    let word = part.options[COUNT];
    let count = (word & u64::from(u32::MAX)) as usize;
    (word & u64::from(u32::MAX) << 32 == TAG && (1..=COUNT_MAX).contains(&count)).then_some(count)
}

/// The region of a part that is one of several; of one that is cut by hash it says nothing.
pub(crate) fn region<R: Region>(part: &Structure) -> Option<R> {
    count(part).filter(|&count| count > 1)?;
    let all = &part.options[REGION..];
    let region = R::decode(&mut &all[..]).ok()?;
    // Of a part that is cut by hash all these words are 0, which may mean a region, too.
    all.iter().any(|&word| word != 0).then_some(region)
}

/// How a structure in these parts is cut.
pub(crate) fn cut<S: Subject>(data: &S::Data, plan: &Plan, parts: &[Structure]) -> anyhow::Result<ShardKey<S::Region>> {
    if parts.len() == 1 {
        return Ok(ShardKey::whole());
    }
    if let Some(regions) = parts.iter().map(region::<S::Region>).collect::<Option<Vec<_>>>() {
        let name = &plan.name;
        let why = "were not made together: drop them, or give another --name";
        ensure!(S::Region::are_everything(&regions), "the parts of `{name}` {why}");
        return Ok(ShardKey::Regions(regions));
    }
    match route::cut::<S>(data, plan) {
        ShardKey::Hash(_) => Ok(ShardKey::Hash(parts.len())),
        ShardKey::Regions(regions) if regions.iter().any(|region| words(region).is_none()) => {
            Ok(ShardKey::Regions(regions))
        }
        ShardKey::Regions(_) => {
            let silent = parts.iter().find(|part| region::<S::Region>(part).is_none());
            let silent = silent.map_or(plan.name.as_str(), |part| &part.name);
            bail!("`{silent}` does not say which part of `{}` it is; give another --name", plan.name)
        }
    }
}
