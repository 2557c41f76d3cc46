//! Access to pages in local memory, with no cache: what the tree's own code costs when nothing is remote.
//!
//! A link is an offset into one mapping, so `follow` is an addition, a check of bounds and alignment, and the checks that
//! every access makes: the lock word, the self-address, the structure. A read runs over the shared words and is handed out
//! if the lock word has not changed.
//!
//! [`Ahead`] says what `follow` does before it touches a page whose words are probably in DRAM. A search loads a page's
//! keys one after another, each load waiting for the one before; asking for all their cache lines first makes it one wait.
//! If the worker's other tasks run during that wait, several operations in flight hide it. Only then does anything here
//! suspend.
//!
//! It only reads: changing, allocating, freeing and single-word access end with [`Error::BadOption`].

use std::{cell::Cell, ops::Range, sync::Arc};

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    error::Error,
    lock::{LockState, LockWord},
    page::{IDENTITY, Identity, LOCK, SELF, SizeClass},
    pages::{NewPage, Placement},
    ptr::{Link, RemotePtr, Target},
    structure::Structure,
    sync::{AtomicU64, Ordering, fence},
    worker::Handle,
};

use crate::tree::LocalPages;

/// Children of pages above this level are in the processor's caches anyway: a switch to another task would cost more than
/// the miss.
const PREFETCH_FROM_LEVEL_MAX: u8 = 2;
/// Words asked for: the header and, of pages of 1 KiB, all keys that nine tenths of a page hold.
pub(crate) const PREFETCH_WORDS: usize = 64;
const LINE_WORDS: usize = 8;

/// What is done before a page is touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// Nothing.
    Nothing,
    /// The processor is asked for the page's header and keys.
    Prefetch,
    /// The same, and other tasks of the worker run before the page is touched.
    PrefetchAndYield,
}

/// Direct access to a structure in local memory; see the [module](self).
#[derive(Debug, Clone)]
pub(crate) struct Direct {
    worker: Handle,
    structure: Structure,
    pages: Arc<LocalPages>,
    ahead: Ahead,
    /// Whether lookups are answered at once, that is, not by the async code.
    at_once: bool,
    notes: Cell<[u64; 2]>,
}

impl Direct {
    /// Access to `structure`, whose pages are `pages`.
    pub(crate) fn new(worker: &Handle, structure: Structure, pages: Arc<LocalPages>, ahead: Ahead) -> Self {
        Self { worker: worker.clone(), structure, pages, ahead, at_once: false, notes: Cell::default() }
    }

    /// The same, and pages are at hand where other tasks need not run first: lookups are answered without the async code.
    pub(crate) fn at_once(self) -> Self {
        Self { at_once: self.ahead != Ahead::PrefetchAndYield, ..self }
    }

    #[inline]
    fn words(&self, at: RemotePtr) -> Result<&[AtomicU64], Interrupt> {
        match self.pages.page(at, self.structure.class) {
            Some(words) => Ok(words),
            None => Err(bad_pointer(at.raw(), "no page stands there")),
        }
    }

    #[inline]
    fn accept<'a>(&self, at: RemotePtr, words: &'a [AtomicU64]) -> Result<DirectPage<'a>, Interrupt> {
        let lock = LockWord::from_word(words[LOCK].load(Ordering::Acquire));
        match lock.state() {
            LockState::Unlocked => {}
            LockState::LockedBy(_) => return Err(Interrupt::conflict()),
            LockState::Free => return Err(Interrupt::stale(at, "the page is free")),
        }
        if words[SELF].load(Ordering::Relaxed) != at.raw() {
            return Err(Interrupt::stale(at, "the page has another address"));
        }
        match Identity::from_word(words[IDENTITY].load(Ordering::Relaxed)) {
            Some(identity) if identity.structure == self.structure.id && identity.class == self.structure.class => {
                Ok(DirectPage { words, at, lock, level: identity.level, kind: identity.kind })
            }
            _ => Err(Interrupt::stale(at, "the page belongs to another structure, or has another size")),
        }
    }
}

#[cold]
fn bad_pointer(word: u64, why: &'static str) -> Interrupt {
    Error::BadPointer { word, why: why.into() }.into()
}

#[cold]
fn only_reads() -> Error {
    Error::BadOption { option: "access", why: "direct access to local memory only reads".into() }
}

#[inline]
fn remote(link: Link) -> Result<RemotePtr, Interrupt> {
    match link.target() {
        Target::Remote(page) => Ok(page),
        Target::Null => Err(bad_pointer(0, "the link is null")),
        Target::Local(_) => Err(bad_pointer(link.word(), "a swizzled link reached remote memory")),
    }
}

/// Asks the processor for the cache lines of these words of a page.
#[inline]
pub(crate) fn prefetch(page: &[AtomicU64], words: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let words = page.get(words.start..words.end.min(page.len())).unwrap_or(&[]);
        let (Some(first), Some(last)) = (words.first(), words.last()) else { return };
        // SAFETY: a prefetch of any address is harmless; these lie in a live mapping.
        let prefetch = |word: &AtomicU64| unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
        prefetch(first);
        prefetch(last);
        if words.len() > LINE_WORDS + 1 {
            words[LINE_WORDS..].iter().step_by(LINE_WORDS).for_each(prefetch);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (page, words);
}

/// A page in local memory, at the version at which it was reached.
#[derive(Debug)]
pub(crate) struct DirectPage<'a> {
    words: &'a [AtomicU64],
    at: RemotePtr,
    lock: LockWord,
    level: u8,
    kind: u8,
}

impl PageRef for DirectPage<'_> {
    type Words = [AtomicU64];

    #[inline]
    fn at(&self) -> RemotePtr {
        self.at
    }

    #[inline]
    fn level(&self) -> u8 {
        self.level
    }

    #[inline]
    fn kind(&self) -> u8 {
        self.kind
    }

    #[inline(always)]
    fn read<R>(&self, f: impl FnOnce(&[AtomicU64]) -> R) -> Result<R, Interrupt> {
        let result = f(self.words);
        fence(Ordering::Acquire);
        if self.words[LOCK].load(Ordering::Relaxed) != self.lock.word() {
            return Err(Interrupt::conflict());
        }
        Ok(result)
    }
}

/// Views of a change: there are none.
#[derive(Debug)]
pub(crate) enum NoViews {}

impl Views for NoViews {
    fn count(&self, _page: usize) -> usize {
        match *self {}
    }

    fn word(&self, _page: usize, _index: usize) -> u64 {
        match *self {}
    }

    fn set(&mut self, _page: usize, _index: usize, _word: u64) {
        match *self {}
    }

    fn describe(&mut self, _page: usize, _level: u8, _kind: u8) {
        match *self {}
    }

    fn free(&mut self, _page: usize) {
        match *self {}
    }
}

impl Access for Direct {
    type Page<'a> = DirectPage<'a>;
    type Views<'a> = NoViews;

    fn worker(&self) -> &Handle {
        &self.worker
    }

    fn structure(&self) -> &Structure {
        &self.structure
    }

    async fn enter(&self, start: Start) -> Result<DirectPage<'_>, Interrupt> {
        let at = match start {
            Start::Page(page) => page,
            _ => self.structure.root,
        };
        self.accept(at, self.words(at)?)
    }

    #[inline(always)]
    fn root_at_hand(&self) -> Option<DirectPage<'_>> {
        if !self.at_once {
            return None;
        }
        let at = self.structure.root;
        self.accept(at, self.words(at).ok()?).ok()
    }

    async fn follow<'a>(&'a self, from: &DirectPage<'a>, link: Link) -> Result<DirectPage<'a>, Interrupt> {
        self.follow_for(from, link, [0..PREFETCH_WORDS, 0..0, 0..0]).await
    }

    async fn follow_for<'a>(
        &'a self,
        from: &DirectPage<'a>,
        link: Link,
        ranges: [Range<usize>; 3],
    ) -> Result<DirectPage<'a>, Interrupt> {
        let at = remote(link)?;
        let words = self.words(at)?;
        if self.ahead != Ahead::Nothing && from.level <= PREFETCH_FROM_LEVEL_MAX {
            ranges.into_iter().for_each(|range| prefetch(words, range));
            if self.ahead == Ahead::PrefetchAndYield {
                self.worker.yield_now().await;
            }
        }
        self.accept(at, words)
    }

    #[inline(always)]
    fn at_hand<'a>(&'a self, from: &DirectPage<'a>, link: Link, ranges: [Range<usize>; 3]) -> Option<DirectPage<'a>> {
        if !self.at_once {
            return None;
        }
        let at = remote(link).ok()?;
        let words = self.words(at).ok()?;
        if self.ahead != Ahead::Nothing && from.level <= PREFETCH_FROM_LEVEL_MAX {
            ranges.into_iter().for_each(|range| prefetch(words, range));
        }
        self.accept(at, words).ok()
    }

    fn notes(&self) -> Option<&Cell<[u64; 2]>> {
        (self.ahead != Ahead::Nothing).then_some(&self.notes)
    }

    #[inline]
    async fn expect<'a>(&'a self, page: &DirectPage<'a>, words: [Range<usize>; 2]) {
        if self.ahead == Ahead::Nothing || page.level != 0 {
            return;
        }
        words.into_iter().for_each(|range| prefetch(page.words, range));
        if self.ahead == Ahead::PrefetchAndYield {
            self.worker.yield_now().await;
        }
    }

    async fn follow_many<'a>(
        &'a self,
        from: &DirectPage<'a>,
        links: &[Link],
    ) -> Vec<Result<DirectPage<'a>, Interrupt>> {
        let mut pages = Vec::with_capacity(links.len());
        for &link in links {
            pages.push(self.follow(from, link).await);
        }
        pages
    }

    async fn change<'a, R>(
        &'a self,
        _pages: Vec<Self::Page<'a>>,
        _new: Vec<NewPage>,
        _f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt> {
        Err(only_reads().into())
    }

    async fn load(&self, _word: RemotePtr) -> Result<u64, Interrupt> {
        Err(only_reads().into())
    }

    async fn compare_swap(&self, _word: RemotePtr, _old: u64, _new: u64) -> Result<u64, Interrupt> {
        Err(only_reads().into())
    }

    async fn allocate(&self, _class: SizeClass, _placement: Placement) -> Result<NewPage, Error> {
        Err(only_reads())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use farlink_structures::btree::BTree;

    use super::*;
    use crate::{hand::Hand, tree::LocalTree};

    #[test]
    fn direct_and_hand_agree_with_a_map_also_on_absent_keys() {
        for count in [0u64, 1, 2, 53, 54, 55, 1000, 30_000] {
            let map: BTreeMap<u64, u64> = (0..count).map(|index| (index * 3 + 1, index ^ 0x55)).collect();
            let tree = LocalTree::build(map.clone(), map.len()).unwrap();
            let hand = Hand::new(&tree.structure, &tree.pages, true);
            let plain = Hand::new(&tree.structure, &tree.pages, false);
            let worker = tree.compute.worker().unwrap();
            let probes = (0..count * 3 + 6).chain([u64::MAX - 1, u64::MAX]);
            for ahead in [Ahead::Nothing, Ahead::Prefetch, Ahead::PrefetchAndYield] {
                let direct = Direct::new(&worker, tree.structure.clone(), tree.pages.clone(), ahead);
                let (direct, at_once) = (BTree::over(direct.clone()), BTree::over(direct.at_once()));
                for key in probes.clone() {
                    assert_eq!(worker.block_on(direct.get(key)).unwrap(), map.get(&key).copied(), "{count}: {key}");
                    assert_eq!(worker.block_on(at_once.get(key)).unwrap(), map.get(&key).copied(), "{count}: {key}");
                    assert_eq!(plain.get(key), map.get(&key).copied(), "{count}: {key}");
                    assert_eq!(hand.get(key), map.get(&key).copied(), "{count}: {key}");
                }
            }
        }
    }

    #[test]
    fn changes_and_bad_links_are_refused() {
        let tree = LocalTree::build([(1, 2)], 1).unwrap();
        let worker = tree.compute.worker().unwrap();
        let access = Direct::new(&worker, tree.structure.clone(), tree.pages.clone(), Ahead::Nothing);
        let direct = BTree::over(access.clone());
        assert!(matches!(worker.block_on(direct.insert(3, 4)), Err(Error::BadOption { .. })));
        let far = farlink_runtime::ptr::ServerId::new(1).unwrap();
        let root = tree.structure.root;
        for link in [
            Link::NULL,
            Link::from_word(1 << 63 | 64),
            Link::remote(root.add(8).unwrap()),
            Link::remote(RemotePtr::new(far, root.offset()).unwrap()),
            Link::remote(RemotePtr::new(root.server(), 1 << 40).unwrap()),
        ] {
            let result = worker.block_on(async {
                let root = access.enter(Start::Root).await.unwrap();
                access.follow(&root, link).await.map(|page| page.at())
            });
            assert!(matches!(result, Err(Interrupt::Failed(_))), "{link:?}: {result:?}");
        }
    }

    #[test]
    fn a_locked_page_and_a_page_that_changed_are_conflicts() {
        let tree = LocalTree::build([(1, 2)], 1).unwrap();
        let worker = tree.compute.worker().unwrap();
        let access = Direct::new(&worker, tree.structure.clone(), tree.pages.clone(), Ahead::Nothing);
        let words = tree.pages.page(tree.structure.root, tree.structure.class).unwrap();
        let unlocked = LockWord::from_word(words[LOCK].load(Ordering::Relaxed));
        let page = worker.block_on(access.enter(Start::Root)).unwrap();
        assert!(page.read(|_| ()).is_ok());
        words[LOCK].store(LockWord::unlocked(unlocked.next_version()).word(), Ordering::Release);
        assert!(matches!(page.read(|_| ()), Err(Interrupt::Restart(_))));
        words[LOCK].store(unlocked.locked_by(worker.owner()).word(), Ordering::Release);
        assert!(matches!(worker.block_on(access.enter(Start::Root)), Err(Interrupt::Restart(_))));
    }
}
