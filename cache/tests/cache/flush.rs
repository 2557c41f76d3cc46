//! What a flush asks of the store at a time.

use std::{
    cell::Cell,
    ops::{Deref, DerefMut},
    rc::Rc,
};

use crate::support::*;
use farlink_cache::{CacheOptions, PageCache, PageId, SizeClass, Store};

/// Bytes of the buffers that there are, and the most that there were.
type Alive = Rc<Cell<(usize, usize)>>;

/// A buffer that is counted.
struct Counted(Vec<u64>, Alive);

impl Counted {
    fn new(words: usize, alive: &Alive) -> Self {
        let (now, most) = alive.get();
        alive.set((now + words * 8, most.max(now + words * 8)));
        Self(vec![0; words], Rc::clone(alive))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let (now, most) = self.1.get();
        self.1.set((now - self.0.len() * 8, most));
    }
}

impl Deref for Counted {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.0
    }
}

impl DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }
}

/// A store that makes pages up, and takes a while to write.
#[derive(Clone)]
struct Counting(Executor, Alive);

impl Store for Counting {
    type Buffer = Counted;
    type Error = Refused;

    fn buffer(&self, words: usize) -> Result<Counted, Refused> {
        Ok(Counted::new(words, &self.1))
    }

    async fn read(&self, page: PageId, class: SizeClass) -> Result<Counted, Refused> {
        let mut image = Counted::new(class.words(), &self.1);
        image[crate::support::page::ID] = page.get();
        Ok(image)
    }

    async fn write(&self, pages: Vec<(PageId, Counted)>) -> Vec<Result<(), Refused>> {
        pause(10).await;
        pages.iter().map(|_| Ok(())).collect()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.0.spawn(task);
    }
}

/// The size of one page says nothing of the others.
#[test]
#[cfg_attr(miri, ignore = "no other code than elsewhere, much memory")]
fn a_flush_has_few_bytes_on_their_way_at_a_time() {
    let (executor, alive) = (Executor::alone(seed(1)), Alive::default());
    let cache = PageCache::new(TreeLayout, CacheOptions::new(32 << 20)).unwrap();
    let handle = cache.handle(Counting(executor.clone(), Rc::clone(&alive)), 1).unwrap();
    let most = executor.block_on(async move {
        let sizes = [64].into_iter().chain([65536; 300]);
        for (number, bytes) in (1..).zip(sizes) {
            let page = handle.load(PageId::new(number).unwrap(), class(bytes)).await.unwrap();
            handle.update(&page, |change| change.set(0, 7, number)).unwrap();
        }
        alive.set((0, 0));
        handle.flush().await.unwrap();
        assert_eq!(alive.get().0, 0);
        alive.get().1
    });
    assert!(most <= 4 << 20, "{most} bytes on their way at once");
}
