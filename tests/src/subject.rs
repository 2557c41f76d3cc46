//! The structures under test: every ordered map there is. A new one is named here, and has all their tests.

use std::str::FromStr;

use farlink_runtime::{access::Access, error::Error};
use farlink_structures::{
    btree::Tree,
    bwtree::Bw,
    map::{Map, OrderedMap},
    skiplist::List,
};
use serde::{Deserialize, Serialize};

/// A structure under test.
#[allow(async_fn_in_trait, reason = "tests run on one thread")]
pub trait Subject: OrderedMap {
    /// Its name at run time.
    const WHICH: StructureName;

    /// The page size that it can have next to this.
    fn page_bytes(wanted: usize) -> usize {
        wanted.clamp(*Self::ROOT_BYTES.start(), *Self::ROOT_BYTES.end())
    }

    /// Fills an empty map with entries in the order of their keys; `fill` is the share of each page to use, if it has any
    /// choice.
    ///
    /// # Errors
    /// As an insert.
    async fn load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl IntoIterator<Item = (u64, u64)>,
        fill: f64,
    ) -> Result<(), Error>;
}

impl Subject for Tree {
    const WHICH: StructureName = StructureName::BTree;

    async fn load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl IntoIterator<Item = (u64, u64)>,
        fill: f64,
    ) -> Result<(), Error> {
        map.bulk_load(entries, fill).await.map(drop)
    }
}

impl Subject for List {
    const WHICH: StructureName = StructureName::SkipList;

    async fn load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl IntoIterator<Item = (u64, u64)>,
        _fill: f64,
    ) -> Result<(), Error> {
        for (key, value) in entries {
            map.insert(key, value).await?;
        }
        Ok(())
    }
}

impl Subject for Bw {
    const WHICH: StructureName = StructureName::BwTree;

    async fn load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl IntoIterator<Item = (u64, u64)>,
        fill: f64,
    ) -> Result<(), Error> {
        map.bulk_load(entries, fill).await.map(drop)
    }
}

/// Which structure, where that is said at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum StructureName {
    /// [`Tree`].
    #[default]
    BTree,
    /// [`List`].
    SkipList,
    /// [`Bw`].
    BwTree,
}

impl FromStr for StructureName {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "btree" => Ok(Self::BTree),
            "skiplist" => Ok(Self::SkipList),
            "bwtree" => Ok(Self::BwTree),
            _ => anyhow::bail!("it is btree, skiplist or bwtree"),
        }
    }
}

/// Calls a function that is generic over a [`Subject`](crate::subject::Subject) for the structure of this name.
#[macro_export]
macro_rules! of_structure {
    ($name:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $name {
            $crate::subject::StructureName::BTree => $function::<::farlink_structures::btree::Tree>($($argument),*),
            $crate::subject::StructureName::SkipList => $function::<::farlink_structures::skiplist::List>($($argument),*),
            $crate::subject::StructureName::BwTree => $function::<::farlink_structures::bwtree::Bw>($($argument),*),
        }
    };
}

/// Makes a test of each of these functions, which are generic over a [`Subject`](crate::subject::Subject), for each
/// structure with locks; of those behind `bwtree` for the Bw-tree, too.
#[macro_export]
macro_rules! test_every_structure {
    ($($test:ident),+ $(,)? $(; bwtree: $($latch_free:ident),+ $(,)?)?) => {
        mod btree {
            $(#[test] fn $test() { super::$test::<::farlink_structures::btree::Tree>(); })+
        }
        mod skiplist {
            $(#[test] fn $test() { super::$test::<::farlink_structures::skiplist::List>(); })+
        }
        $(mod bwtree {
            $(#[test] fn $latch_free() { super::$latch_free::<::farlink_structures::bwtree::Bw>(); })+
        })?
    };
}
