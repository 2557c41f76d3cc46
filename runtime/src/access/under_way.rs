//! Several pages, or whatever an operation waits for, on their way at a time.

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::{Access, Hint, Interrupt, Link};
use crate::worker::Handle;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What an operation waits for, any number at a time; results come as they are ready.
///
/// What was added is begun before anything that is ready is handed out, so that its requests are on their way while the operation
/// looks at that. They get a doorbell of their own if the worker has no other operation that would use the wait.
///
/// While the operation awaits something else, nobody polls what is pending here; over a cache that waits for ever if both want the same
/// page. So what else is wanted meanwhile is added, too.
pub struct UnderWay<'a, T> {
    worker: &'a Handle,
    added: Vec<Boxed<'a, T>>,
    ready: VecDeque<T>,
    waiting: FuturesUnordered<Boxed<'a, T>>,
}

impl<T> fmt::Debug for UnderWay<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnderWay({})", self.len())
    }
}

impl<'a, T> UnderWay<'a, T> {
    /// Nothing yet, for an operation of this worker.
    pub fn new(worker: &'a Handle) -> Self {
        Self { worker, added: Vec::new(), ready: VecDeque::new(), waiting: FuturesUnordered::new() }
    }

    /// Adds something to wait for.
    pub fn push(&mut self, future: impl Future<Output = T> + 'a) {
        self.added.push(Box::pin(future));
    }

    /// How many have been added and not been handed out.
    pub fn len(&self) -> usize {
        self.added.len() + self.ready.len() + self.waiting.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next one; `None` if there is none.
    pub async fn next(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        // What has come is taken in first: it may make room for what is begun.
        while let Poll::Ready(Some(result)) = self.waiting.poll_next_unpin(cx) {
            self.ready.push_back(result);
        }
        let begins = !self.added.is_empty();
        for mut future in self.added.drain(..) {
            match future.as_mut().poll(cx) {
                Poll::Ready(result) => self.ready.push_back(result),
                Poll::Pending => self.waiting.push(future),
            }
        }
        if let Some(next) = self.ready.pop_front() {
            if !self.worker.has_other_tasks() {
                self.worker.ring();
            }
            return Poll::Ready(Some(next));
        }
        // What was begun wakes the task, and has a waker that tells it apart from its next poll on: another one now would end what
        // suspends but once.
        if begins { Poll::Pending } else { self.waiting.poll_next_unpin(cx) }
    }
}

/// Pages on their way: see [`Access::follow_each`].
pub struct Each<'a, A: Access> {
    access: &'a A,
    to_follow: VecDeque<(usize, Rc<A::Page<'a>>, Link)>,
    under_way: UnderWay<'a, (usize, Result<A::Page<'a>, Interrupt>)>,
    count: usize,
}

impl<A: Access> fmt::Debug for Each<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Each({} on their way, {} waiting)", self.under_way.len(), self.to_follow.len())
    }
}

impl<'a, A: Access> Each<'a, A> {
    pub(super) fn new(access: &'a A) -> Self {
        Self { access, to_follow: VecDeque::new(), under_way: UnderWay::new(&access.context().worker), count: 0 }
    }

    /// Adds a link to be followed; returns its number, counted from 0.
    pub fn push(&mut self, from: Rc<A::Page<'a>>, link: Link) -> usize {
        self.to_follow.push_back((self.count, from, link));
        self.count += 1;
        self.count - 1
    }

    /// The next page to arrive, with the number of its link; `None` once all have.
    pub async fn next(&mut self) -> Option<(usize, Result<A::Page<'a>, Interrupt>)> {
        let access = self.access;
        while self.under_way.len() < access.context().worker.window() {
            let Some((number, from, link)) = self.to_follow.pop_front() else { break };
            self.under_way.push(async move { (number, access.follow(&from, link, Hint::DOWN).await) });
        }
        self.under_way.next().await
    }

    /// All pages, in the order of their links.
    pub async fn all(mut self) -> Vec<Result<A::Page<'a>, Interrupt>> {
        let mut pages: Vec<_> = (0..self.count).map(|_| None).collect();
        while let Some((number, page)) = self.next().await {
            pages[number] = Some(page);
        }
        pages.into_iter().flatten().collect()
    }
}
