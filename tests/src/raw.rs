//! Pages read, locked and damaged by hand: what a broken, slow or dying compute server leaves in remote memory.

use std::sync::Arc;

use anyhow::ensure;
use farlink_runtime::{
    access::{Access, Hint, PageRef, Plugin, Start, Words},
    buffer::Buffer,
    fabric::Fabric,
    lock::{LockState, LockWord},
    one_sided::OneSided,
    page::{self, HEADER_WORDS, IDENTITY, Identity, LOCK, PAGE_WORDS_MAX, SELF, SizeClass, StructureId},
    ptr::{Link, RemotePtr, ServerId},
    worker::Handle,
};

use farlink_structures::{btree::Tree, map::KeyRange};

use crate::direct::Direct;

// The B+-tree's page layout, as its module `node` documents it. It is repeated here because a test that damages pages
// must not depend on code that it tests.

/// Position of the low fence in a page of the B+-tree.
pub const LOW: usize = 4;
/// Position of the high fence.
pub const HIGH: usize = 5;
/// Position of the link to the right sibling.
pub const RIGHT: usize = 6;
/// Position of the count and the flag of an infinite high fence.
pub const META: usize = 7;
/// Position of the first key.
pub const KEYS: usize = 8;

/// How many entries a page of `words` words holds.
pub const fn capacity(words: usize) -> usize {
    (words - KEYS) / 2
}

/// The leaf where `key` belongs, found without any of the tree's code, and not read: it may be locked or damaged. Nobody may
/// change the tree meanwhile.
///
/// # Errors
/// If a page on the way cannot be read, or leads nowhere.
pub async fn leaf_of(access: &OneSided<Tree>, key: u64) -> anyhow::Result<RemotePtr> {
    let mut page = access.open(Start::Root).await?;
    loop {
        let (at, level) = (page.at(), page.level());
        if level == 0 {
            return Ok(at);
        }
        let link = page.read(|words| {
            let count = ((words[META] & 0xffff) as usize).min(capacity(words.len()));
            let index = words[KEYS..KEYS + count].partition_point(|&low| low <= key).saturating_sub(1);
            Link::from_word(words[KEYS + capacity(words.len()) + index])
        })?;
        let Some((child, _)) = link.remote() else { anyhow::bail!("{at} leads to {link:?}") };
        if level == 1 {
            return Ok(child);
        }
        page = access.read_page(link).await?;
    }
}

/// The page of a level where `key` belongs, as the pages above say; it is not read.
///
/// # Errors
/// If a page on the way cannot be read, or leads nowhere.
pub async fn page_of<P: Plugin<Region = KeyRange>>(
    access: &impl Access<Plugin = P>,
    key: u64,
    level: u8,
) -> anyhow::Result<Link> {
    let mut page = access.open(Start::Root).await?;
    while page.level() > level {
        let link = page.read(|words| {
            let is_it = |&index: &usize| P::below(words, index).is_some_and(|keys| keys.contains(key));
            P::links(words).find(is_it).map(|index| Link::from_word(words.word(index)))
        })?;
        let Some(link) = link else { anyhow::bail!("{} leads to no page for {key}", page.at()) };
        if page.level() == level + 1 {
            return Ok(link);
        }
        page = access.follow(&page, link, Hint::DOWN).await?;
    }
    Ok(page.link())
}

/// A page that this compute server has locked by a compare-and-swap of its own.
#[derive(Debug)]
pub struct HeldPage {
    worker: Handle,
    at: RemotePtr,
    before: LockWord,
    image: Buffer,
}

impl HeldPage {
    /// Locks the leaf where `key` belongs.
    ///
    /// # Errors
    /// If it cannot be found, or somebody else has it.
    pub async fn lock_leaf(worker: &Handle, access: &OneSided<Tree>, key: u64) -> anyhow::Result<Self> {
        let at = leaf_of(access, key).await?;
        let image = worker.read(at, access.context().structure.class.words()).await?;
        ensure!(page::is_whole(&image), "page {at} was not whole");
        let before = LockWord::from_word(image[LOCK]);
        let ours = before.locked_by(worker.owner());
        let found = worker.compare_swap(at, before.word(), ours.word()).await?;
        ensure!(found == before.word(), "page {at} is held by somebody else");
        Ok(Self { worker: worker.clone(), at, before, image })
    }

    /// The page.
    pub fn at(&self) -> RemotePtr {
        self.at
    }

    /// Overwrites the first half of the structure's own words, and goes no further.
    ///
    /// # Errors
    /// If the fabric fails.
    pub async fn write_half(&mut self) -> anyhow::Result<()> {
        let half = (self.image.len() - HEADER_WORDS) / 2;
        let garbage: Vec<u64> = (0..half as u64).map(|index| !index).collect();
        Ok(self.worker.write_words(self.at.add(HEADER_WORDS as u64 * 8)?, &garbage).await?)
    }

    /// Puts back what was there, and unlocks.
    ///
    /// # Errors
    /// If the fabric fails.
    pub async fn give_back(mut self) -> anyhow::Result<()> {
        let version = self.before.next_version();
        self.image[page::CHECKSUM] = page::checksum(&self.image, version);
        self.worker.write_words(self.at.add(8)?, &self.image[1..]).await?;
        let ours = self.before.locked_by(self.worker.owner()).word();
        let found = self.worker.compare_swap(self.at, ours, LockWord::unlocked(version).word()).await?;
        ensure!(found == ours, "somebody broke the lock of page {}", self.at);
        Ok(())
    }
}

/// The pages of one structure and size in a cluster's memory that are in use, in the order of their addresses.
pub fn pages_of(fabric: &Arc<dyn Fabric>, structure: StructureId, class: SizeClass) -> Vec<RemotePtr> {
    let direct = Direct::new(fabric, 0).expect("a fabric gives another endpoint");
    let mut pages = Vec::new();
    for server in servers(fabric) {
        let region_words = (fabric.region_bytes(server) / 8) as usize;
        // Not from the start: there is no pointer to the first word of all, and no page there.
        for first in (class.words()..region_words).step_by(PAGE_WORDS_MAX) {
            let start = RemotePtr::new(server, first as u64 * 8).expect("an address in a region");
            let words = direct.read(start, PAGE_WORDS_MAX.min(region_words - first));
            let words = words.expect("a cluster's memory can be read");
            for (index, page) in words.chunks_exact(class.words()).enumerate() {
                let at = first + index * class.words();
                let Ok(at) = RemotePtr::new(server, at as u64 * 8) else { continue };
                let is_its = Identity::from_word(page[IDENTITY])
                    .is_some_and(|identity| identity.structure == structure && identity.class == class);
                let is_used = LockWord::from_word(page[LOCK]).state() == LockState::Unlocked;
                if page[SELF] == at.raw() && is_its && is_used {
                    pages.push(at);
                }
            }
        }
    }
    pages
}

/// The memory servers of a cluster.
pub fn servers(fabric: &Arc<dyn Fabric>) -> impl Iterator<Item = ServerId> + use<> {
    (0..fabric.servers()).map(|index| ServerId::new(index as u16).expect("a cluster's servers have ids"))
}
