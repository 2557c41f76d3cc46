//! The hybrid design of Ziegler et al. (SIGMOD 2019, section 5): the inner levels are on the server of the root, which searches
//! them; the leaves are everywhere, and are read and changed one-sided. With the key space divided among several servers it is a
//! [`Parted`](crate::Parted) of these.
//!
//! An operation begins with a message that asks for the page where it begins; from there on it is the same code over one-sided
//! access. A leaf is split one-sided, and its separator put into the inner levels by a second message; in between, and if that
//! never comes, the new leaf is found through the right link of the old one. Whoever finds it so sends that message, too.
//!
//! Merges are rare, and are done one-sided, inner pages included: these have remote locks like all others.

use std::{cell::Cell, future::Future};

use farlink_runtime::{
    access::{Access, Interrupt, Start},
    error::Error,
    one_sided::{OneSided, OneSidedViews, PageCopy, Proof},
    operation::{Operation, Routed, Run, retry},
    page::SizeClass,
    pages::{NewPage, Placement},
    ptr::{Link, RemotePtr},
    structure::Structure,
    worker::Handle,
};

use crate::ship::Shipper;

/// A structure whose inner levels a memory server searches, and whose leaves are accessed one-sided.
#[derive(Debug, Clone)]
pub struct Hybrid(Leaves);

impl Hybrid {
    /// Sends searches of the inner levels to the memory server of the root.
    pub fn new(worker: &Handle, structure: Structure, proof: Proof) -> Self {
        let shipper = Shipper::new(worker, structure.clone());
        Self(Leaves { one_sided: OneSided::new(worker, structure, proof), shipper })
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        self.0.one_sided.structure()
    }

    /// Its way to the memory servers.
    pub fn shipper(&self) -> &Shipper {
        &self.0.shipper
    }

    /// Runs an operation from a page that is known, to which the key where it begins belongs, or belonged: no message asks for it.
    ///
    /// # Errors
    /// As [`Run::perform`].
    pub async fn perform_from<O: Routed>(&self, operation: &O, page: RemotePtr) -> Result<O::Output, Error> {
        self.perform_at(operation, Some(page)).await
    }

    async fn perform_at<O: Routed>(&self, operation: &O, known: Option<RemotePtr>) -> Result<O::Output, Error> {
        // From before the server names a page until it is read.
        let _pin = self.0.worker().pin();
        let known = Cell::new(known);
        retry(self.0.worker(), async || {
            let page = match known.take() {
                Some(page) => page,
                None => self.0.shipper.ship_whole(&operation.locate()).await?,
            };
            operation.run(&self.0, Start::Page(page)).await
        })
        .await
    }
}

impl Run for Hybrid {
    fn perform<O: Routed>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        self.perform_at(operation, None)
    }
}

/// Has the server of the inner levels do something, whose outcome nothing depends on.
async fn tell<O: Operation>(shipper: Shipper, operation: O) {
    if let Err(error) = shipper.ship_whole(&operation).await {
        tracing::debug!(%error, "the inner levels were not told of a leaf; it is found through its left neighbour");
    }
}

/// One-sided access, for operations that begin at a page that a memory server has named.
#[derive(Debug, Clone)]
struct Leaves {
    one_sided: OneSided,
    shipper: Shipper,
}

impl Access for Leaves {
    type Page<'a> = PageCopy;
    type Views<'a> = OneSidedViews;
    const IS_BELOW: bool = true;

    fn worker(&self) -> &Handle {
        self.one_sided.worker()
    }

    fn structure(&self) -> &Structure {
        self.one_sided.structure()
    }

    async fn enter(&self, start: Start) -> Result<PageCopy, Interrupt> {
        self.one_sided.enter(start).await
    }

    async fn follow(&self, from: &PageCopy, link: Link) -> Result<PageCopy, Interrupt> {
        self.one_sided.follow(from, link).await
    }

    async fn follow_many(&self, from: &PageCopy, links: &[Link]) -> Vec<Result<PageCopy, Interrupt>> {
        self.one_sided.follow_many(from, links).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt> {
        self.one_sided.change(pages, new, f).await
    }

    async fn change_below<'a, R, O: Operation + 'static>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
        above: O,
    ) -> Result<R, Interrupt> {
        let after = tell(self.shipper.clone(), above);
        self.one_sided.change_then(pages, new, f, Some(after)).await
    }

    fn send_above<O: Operation + 'static>(&self, operation: O) {
        drop(self.worker().spawn_to_end(tell(self.shipper.clone(), operation)));
    }

    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt> {
        self.one_sided.load(word).await
    }

    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt> {
        self.one_sided.compare_swap(word, old, new).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.one_sided.allocate(class, placement).await
    }
}
