//! A small B+-tree on the cache: the tests' example of an embedder. Full pages are split on the way down, sparse ones are
//! merged by removes; the root stays where it is. Every page is checked against its fences, so a wrong way is noticed.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use farlink_cache::{Anchor, CacheError, CacheHandle, Change, Conflict, NewPage, Page, PageError, PageId, SizeClass};

use super::{
    executor::pause,
    page::{HEAD, HIGH, ID, LOW, TreeLayout, View, capacity, head, key_at, value_at},
    store::{MapStore, Refused},
};

pub type Handle = CacheHandle<MapStore, TreeLayout>;
pub type Error = CacheError<Refused>;
type TreePage<'a> = Page<'a, MapStore, TreeLayout>;
pub type New<'a> = NewPage<'a, MapStore, TreeLayout>;

pub const ROOT: u64 = 1;

/// One thread's way to a tree.
#[derive(Clone)]
pub struct Tree {
    pub handle: Handle,
    pub class: SizeClass,
    anchor: Arc<Anchor<TreeLayout>>,
    next_id: Arc<AtomicU64>,
}

/// What is found on a page on the way to a key.
enum Step {
    Down { entry: usize, link: u64, level: u8, is_full: bool, is_single: bool, is_sparse: bool },
    Leaf { found: Option<u64>, entry: usize, is_full: bool },
    Lost,
}

fn step(page: &TreePage<'_>, key: u64) -> Result<Step, Conflict> {
    page.read(|words| {
        let view = View(words);
        let (count, most) = (view.count(), capacity(words.len()));
        if !view.covers(key) || (view.level() != 0 && count == 0) || view.word(ID) != page.id().get() {
            return Step::Lost;
        }
        if view.level() == 0 {
            let entry = view.find(key);
            let found = entry.ok().map(|entry| view.value(entry));
            let (Ok(entry) | Err(entry)) = entry;
            return Step::Leaf { found, entry, is_full: count == most };
        }
        let entry = view.child(key);
        let (is_full, is_single, is_sparse) = (count == most, count == 1, count <= most / 4);
        Step::Down { entry, link: view.value(entry), level: view.level(), is_full, is_single, is_sparse }
    })
}

/// Entries of a page under change.
fn entries(change: &Change<'_>, page: usize) -> Vec<(u64, u64)> {
    let view = View(change.words(page));
    (0..view.count()).map(|entry| (view.key(entry), view.value(entry))).collect()
}

fn fill(change: &mut Change<'_>, page: usize, level: u8, entries: &[(u64, u64)]) {
    change.set(page, HEAD, head(level, entries.len()));
    for (at, &(key, value)) in entries.iter().enumerate() {
        change.set(page, key_at(at), key);
        change.set(page, value_at(at), value);
    }
}

fn fence(change: &mut Change<'_>, page: usize, low: u64, high: u64) {
    change.set(page, LOW, low);
    change.set(page, HIGH, high);
}

impl Tree {
    /// A tree whose root the store has.
    pub async fn open(handle: Handle, class: SizeClass, next_id: Arc<AtomicU64>) -> Result<Self, Error> {
        let anchor = Arc::new(handle.anchor(PageId::new(ROOT).unwrap(), class).await?);
        Ok(Self { handle, class, anchor, next_id })
    }

    /// The root.
    pub fn enter(&self) -> Result<TreePage<'_>, PageError> {
        self.handle.enter(&self.anchor)
    }

    async fn again<T, F: Future<Output = Result<T, Error>>>(&self, mut attempt: impl FnMut() -> F) -> Result<T, Error> {
        loop {
            match attempt().await {
                Err(CacheError::Conflict(_)) => pause(1).await,
                result => return result,
            }
        }
    }

    pub async fn get(&self, key: u64) -> Result<Option<u64>, Error> {
        self.again(|| self.try_get(key)).await
    }

    async fn try_get(&self, key: u64) -> Result<Option<u64>, Error> {
        let mut page = self.handle.enter(&self.anchor)?;
        loop {
            match step(&page, key)? {
                Step::Leaf { found, .. } => return Ok(found),
                Step::Down { link, .. } => page = self.handle.follow(&page, link, self.class).await?,
                Step::Lost => return Err(Conflict::Changed.into()),
            }
        }
    }

    /// Sets a key's value to what `f` makes of it; returns what it was.
    pub async fn update(&self, key: u64, f: impl Fn(Option<u64>) -> u64) -> Result<Option<u64>, Error> {
        self.again(|| self.try_update(key, &f)).await
    }

    async fn try_update(&self, key: u64, f: impl Fn(Option<u64>) -> u64) -> Result<Option<u64>, Error> {
        let mut above = None;
        let mut page = self.handle.enter(&self.anchor)?;
        loop {
            let is_full = match step(&page, key)? {
                Step::Lost => return Err(Conflict::Changed.into()),
                Step::Leaf { found: Some(value), .. } => {
                    // As it is by then: somebody may have been faster.
                    let old = self.handle.update(&page, |change| {
                        let view = View(change.words(0));
                        let is_here = view.level() == 0 && view.covers(key) && view.word(ID) == page.id().get();
                        let entry = view.find(key).ok().filter(|_| is_here)?;
                        let old = view.value(entry);
                        change.set(0, value_at(entry), f(Some(old)));
                        Some(old)
                    })?;
                    let _ = value;
                    return old.map(Some).ok_or(Conflict::Changed.into());
                }
                Step::Leaf { found: None, entry, is_full: false } => {
                    let insert = |change: &mut Change<'_>| {
                        let mut all = entries(change, 0);
                        all.insert(entry, (key, f(None)));
                        fill(change, 0, 0, &all);
                    };
                    self.handle.change(&[&page], Vec::new(), insert)?;
                    return Ok(None);
                }
                Step::Leaf { .. } => true,
                Step::Down { is_full, .. } => is_full,
            };
            if is_full {
                self.split(above.as_ref(), &page).await?;
                return Err(Conflict::Changed.into());
            }
            let Step::Down { link, .. } = step(&page, key)? else { return Err(Conflict::Changed.into()) };
            let below = self.handle.follow(&page, link, self.class).await?;
            above = Some(std::mem::replace(&mut page, below));
        }
    }

    async fn new_page(&self) -> Result<(u64, New<'_>), Error> {
        let id = self.next_id.fetch_add(1, Relaxed);
        Ok((id, self.handle.reserve(PageId::new(id).unwrap(), self.class).await?))
    }

    /// Splits a page that is full; the root gets a page between itself and what is below it.
    async fn split(&self, above: Option<&TreePage<'_>>, page: &TreePage<'_>) -> Result<(), Error> {
        let (id, new) = self.new_page().await?;
        let Some(above) = above else {
            return Ok(self.handle.change(&[page], vec![new], |change| {
                let level = View(change.words(0)).level();
                let all = entries(change, 0);
                fill(change, 1, level, &all);
                fence(change, 1, 0, u64::MAX);
                change.set(1, ID, id);
                fill(change, 0, level + 1, &[(0, id)]);
            })?);
        };
        Ok(self.handle.change(&[above, page], vec![new], |change| {
            let (level, high) = (View(change.words(1)).level(), change.word(1, HIGH));
            let low = change.word(1, LOW);
            let all = entries(change, 1);
            let (left, right) = all.split_at(all.len() / 2);
            let border = right[0].0;
            fill(change, 2, level, right);
            fence(change, 2, border, high);
            change.set(2, ID, id);
            fill(change, 1, level, left);
            fence(change, 1, low, border);
            let mut links = entries(change, 0);
            let at = links.iter().position(|&(key, _)| key > border).unwrap_or(links.len());
            links.insert(at, (border, id));
            let level = View(change.words(0)).level();
            fill(change, 0, level, &links);
        })?)
    }

    pub async fn remove(&self, key: u64) -> Result<Option<u64>, Error> {
        self.again(|| self.try_remove(key)).await
    }

    async fn try_remove(&self, key: u64) -> Result<Option<u64>, Error> {
        let mut above: Option<(TreePage<'_>, usize, bool)> = None;
        let mut page = self.handle.enter(&self.anchor)?;
        loop {
            match step(&page, key)? {
                Step::Lost => return Err(Conflict::Changed.into()),
                Step::Down { entry, link, level, is_single, is_sparse, .. } => {
                    if let (true, Some((above, at, false))) = (is_sparse, &above)
                        && self.merge(above, *at).await?
                    {
                        return Err(Conflict::Changed.into());
                    }
                    let below = self.handle.follow(&page, link, self.class).await?;
                    if above.is_none() && is_single && level > 0 {
                        self.shrink(&page, &below)?;
                        return Err(Conflict::Changed.into());
                    }
                    above = Some((std::mem::replace(&mut page, below), entry, is_single));
                }
                Step::Leaf { found: None, .. } => return Ok(None),
                Step::Leaf { found, entry, .. } => {
                    let left = self.handle.change(&[&page], Vec::new(), |change| {
                        let mut all = entries(change, 0);
                        all.remove(entry);
                        fill(change, 0, 0, &all);
                        all.len()
                    })?;
                    if let (true, Some((above, at, false))) = (left <= 2, &above) {
                        // Only pruning up: the key is gone, whatever comes of this.
                        let _ = self.merge(above, *at).await;
                    }
                    return Ok(found);
                }
            }
        }
    }

    /// Merges a child with a neighbour, if both fit in one page.
    async fn merge(&self, above: &TreePage<'_>, at: usize) -> Result<bool, Error> {
        let at = at.saturating_sub(1);
        let links = above.read(|words| {
            let view = View(words);
            (at + 1 < view.count()).then(|| (view.value(at), view.value(at + 1)))
        })?;
        let Some((left, right)) = links else { return Ok(false) };
        let left = self.handle.follow(above, left, self.class).await?;
        let right = self.handle.follow(above, right, self.class).await?;
        let count = |page: &TreePage<'_>| page.read(|words| View(words).count());
        let most = capacity(self.class.words());
        if count(&left)? + count(&right)? > most / 2 {
            return Ok(false);
        }
        self.handle.change(&[above, &left, &right], Vec::new(), |change| {
            let level = View(change.words(1)).level();
            assert_eq!(change.word(1, HIGH), change.word(2, LOW), "they are neighbours");
            let all: Vec<_> = entries(change, 1).into_iter().chain(entries(change, 2)).collect();
            fill(change, 1, level, &all);
            let high = change.word(2, HIGH);
            change.set(1, HIGH, high);
            change.free(2);
            let mut links = entries(change, 0);
            links.remove(at + 1);
            fill(change, 0, level + 1, &links);
        })?;
        Ok(true)
    }

    /// The root takes the place of its only child.
    fn shrink(&self, root: &TreePage<'_>, child: &TreePage<'_>) -> Result<(), PageError> {
        self.handle.change(&[root, child], Vec::new(), |change| {
            let level = View(change.words(1)).level();
            let all = entries(change, 1);
            fill(change, 0, level, &all);
            change.free(1);
        })
    }

    /// The page below `above` that covers a key, and its link.
    pub async fn path(&self, key: u64) -> Result<Vec<TreePage<'_>>, Error> {
        let mut path = vec![self.handle.enter(&self.anchor)?];
        while let Step::Down { link, .. } = step(path.last().unwrap(), key)? {
            path.push(self.handle.follow(path.last().unwrap(), link, self.class).await?);
        }
        Ok(path)
    }
}
