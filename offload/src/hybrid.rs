//! The hybrid design of Ziegler et al. (SIGMOD 2019, section 5): the inner levels are on the server of the root, which searches
//! them; the leaves are everywhere, and are read and changed one-sided. With the key space divided among several servers it is a
//! [`Sharded`](crate::Sharded) of these.
//!
//! An operation begins on that server, which searches the inner levels and answers with the page from which the rest is to be
//! done; from there on it is the same code over one-sided access. What needs the pages above (a split, a merge) begins anew
//! one-sided at the root: inner pages have remote locks like all others. Theirs has the server put separators into them.
//!
//! Where the answer is the root, the message was in vain. So it is for operations that go down several links of the root, such as
//! searches of an R-tree: once that has shown, they begin one-sided, and ask only now and then.

use std::{cell::RefCell, future::Future, rc::Rc};

use farlink_runtime::{
    access::{Cause, FastPath, Interrupt, Link, Operation, Plugin, Start, Structure},
    error::Error,
    messaging::Error as MessagingError,
    one_sided::{OneSided, Proof},
    operation::{Code, Restarts, Run},
    worker::Handle,
};
use smallvec::SmallVec;

use crate::ship::{Answer, From, Shipper};

/// A structure whose inner levels a memory server searches, and whose leaves are accessed one-sided.
#[derive(Debug, Clone)]
pub struct Hybrid<P: Plugin> {
    leaves: OneSided<P>,
    shipper: Shipper<P>,
    in_vain: Rc<RefCell<InVain>>,
}

/// So many messages in a row are in vain before operations of that name begin without one.
const IN_VAIN_MAX: u32 = 16;
/// Of those one in so many asks: what the structure has become may make it pay.
const ASKS_EVERY: u32 = 64;

/// How many answers to operations of a name in a row were in vain; and, once they are too many, how many operations did not ask.
#[derive(Debug, Default)]
struct InVain(SmallVec<[(Code, u32); 4]>);

impl InVain {
    fn of(&mut self, operation: Code) -> &mut u32 {
        let known = self.0.iter().position(|&(code, _)| code == operation);
        let index = known.unwrap_or_else(|| {
            self.0.push((operation, 0));
            self.0.len() - 1
        });
        &mut self.0[index].1
    }

    /// Whether the next one is to ask. One that does not is counted here, one that does with its answer.
    fn asks(&mut self, operation: Code) -> bool {
        let count = self.of(operation);
        if *count < IN_VAIN_MAX {
            return true;
        }
        *count = count.checked_add(1).unwrap_or(IN_VAIN_MAX);
        (*count - IN_VAIN_MAX).is_multiple_of(ASKS_EVERY)
    }

    /// One has asked in vain.
    fn note(&mut self, operation: Code) {
        let count = self.of(operation);
        *count += u32::from(*count < IN_VAIN_MAX);
    }
}

/// From where an attempt goes on.
enum Found<T> {
    From(Start),
    Done(T),
}

impl<P: Plugin> Hybrid<P> {
    /// Sends searches of the inner levels to the memory server of the root.
    pub fn new(worker: &Handle, structure: Structure, proof: Proof) -> Self {
        let shipper = Shipper::new(worker, structure.clone());
        Self { leaves: OneSided::new(worker, structure, proof), shipper, in_vain: Rc::default() }
    }

    /// The same; reading asks for no right, as [there](OneSided::beside_owners).
    pub fn beside_owners(self) -> Self {
        Self { leaves: self.leaves.beside_owners(), ..self }
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        self.shipper.structure()
    }

    /// Its way to the leaves.
    pub fn leaves(&self) -> &OneSided<P> {
        &self.leaves
    }

    /// Its way to the memory servers.
    pub fn shipper(&self) -> &Shipper<P> {
        &self.shipper
    }

    /// Runs an operation from a page that is known, to which what it is about belongs, or belonged: no message asks for it.
    ///
    /// # Errors
    /// As [`Run::execute`].
    pub async fn execute_from<O: Operation<Plugin = P>>(&self, operation: &O, page: Link) -> Result<O::Output, Error> {
        self.perform_at(operation, Some(Start::Page(page))).await
    }

    async fn perform_at<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        mut known: Option<Start>,
    ) -> Result<O::Output, Error> {
        let worker = self.shipper.worker();
        // From before the server names a page until it is read.
        let mut pin = worker.pin();
        let mut restarts = Restarts::from_root(self.structure().root);
        loop {
            let Some(right) = self.leaves.right(O::READS_ONLY) else {
                // It may take a while.
                drop(pin);
                self.leaves.enter().await?;
                pin = worker.pin();
                continue;
            };
            let found = match known.take() {
                Some(start) => Ok(Found::From(start)),
                None => self.search(operation).await,
            };
            let outcome = match found {
                Ok(Found::From(start)) => operation.run(&self.leaves, start).await,
                Ok(Found::Done(output)) => Ok(output),
                Err(error) => Err(error.into()),
            };
            match outcome {
                _ if !self.leaves.stands(right, O::READS_ONLY) => {
                    restarts.back_off(worker, Interrupt::conflict()).await?;
                }
                Ok(output) => return Ok(output),
                Err(interrupt) => {
                    // Having made room above, it goes on there.
                    let is_above = matches!(interrupt, Interrupt::Restart(Cause::Above | Cause::Again));
                    known = is_above.then_some(Start::Root);
                    restarts.back_off(worker, interrupt).await?;
                }
            }
        }
    }

    /// Has the server search. What only reads is sent once more if it is lost with a server; nothing else is lost with it.
    async fn search<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<Found<O::Output>, Error> {
        if !self.in_vain.borrow_mut().asks(Code::of::<O>()) {
            return Ok(Found::From(Start::Root));
        }
        let answer = match self.shipper.ship(operation, From::Above).await {
            Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })) => {
                self.shipper.ship(operation, From::Above).await
            }
            answer => answer,
        };
        let found = match answer {
            Ok(Answer::Done(shipped)) => Found::Done(shipped.output),
            Ok(Answer::GoOn(page)) if page != self.structure().root_link() => Found::From(Start::Page(page)),
            Ok(Answer::GoOn(_) | Answer::Declined(_)) => {
                self.in_vain.borrow_mut().note(Code::of::<O>());
                return Ok(Found::From(Start::Root));
            }
            Err(error @ Error::NotBegun { .. }) => {
                tracing::debug!(%error, "the inner levels are searched from here instead");
                return Ok(Found::From(Start::Root));
            }
            Err(error) => return Err(error),
        };
        *self.in_vain.borrow_mut().of(Code::of::<O>()) = 0;
        Ok(found)
    }
}

impl<P: Plugin> Run for Hybrid<P> {
    type Plugin = P;

    fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        self.perform_at(operation, None)
    }
}
