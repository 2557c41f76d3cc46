//! The operations that a memory server knows.

use std::{collections::HashMap, fmt, future::Future, pin::Pin, rc::Rc};

use farlink_runtime::{
    access::{Access, Cause, Interrupt, Start},
    error::Error,
    messaging::{Refusal, Responder},
    operation::{Code, Operation, execute},
    structure::Layout,
    wire::{Wire, decode_all},
};

use super::{
    layout::{CallHeader, Failure, ReplyHeader},
    serve::{Outcome, Thread},
};
use crate::on_server::{Below, Decline, OnServer, Scope};

/// Attempts at an operation below a page, before it goes back to where it came from.
const ATTEMPTS_MAX: u32 = 8;

type Running = Pin<Box<dyn Future<Output = ()>>>;
/// Begins an operation, given the words behind the header.
type Begin = fn(&Rc<Thread>, CallHeader, &[u64], Responder) -> Result<Running, (Refusal, Responder)>;

/// The operations that memory servers carry out.
///
/// ```
/// use farlink_offload::ship::Registry;
/// use farlink_structures::{btree::Tree, map};
///
/// let mut registry = Registry::new();
/// registry.add::<map::ops::Get<Tree>>();
/// // Or all of a structure's.
/// map::register::<Tree>(&mut registry);
/// assert!(registry.len() > 1);
/// ```
#[derive(Clone, Default)]
pub struct Registry(HashMap<Code, Begin>);

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl Registry {
    /// Knows none.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operation.
    pub fn add<O: Operation + 'static>(&mut self) -> &mut Self {
        self.0.insert(O::CODE, begin::<O>);
        self
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Begins what a request asks for; refuses what makes no sense, or is not known.
    pub(super) fn begin(&self, thread: &Rc<Thread>, mut words: &[u64], reply: Responder) -> Option<Running> {
        let begun = match CallHeader::decode(&mut words) {
            Err(_) => Err((Refusal::Malformed, reply)),
            Ok(header) => match self.0.get(&header.code) {
                None => Err((Refusal::UnknownKind, reply)),
                Some(begin) => begin(thread, header, words, reply),
            },
        };
        begun.map_err(|(why, reply)| reply.refuse(why)).ok()
    }
}

fn begin<O: Operation + 'static>(
    thread: &Rc<Thread>,
    header: CallHeader,
    words: &[u64],
    reply: Responder,
) -> Result<Running, (Refusal, Responder)> {
    match decode::<O>(header, words) {
        Ok((scope, operation)) => Ok(Box::pin(run(Rc::clone(thread), header, scope, operation, reply))),
        Err(_) => Err((Refusal::Malformed, reply)),
    }
}

type ScopeOf<O> = Scope<<<O as Operation>::Layout as Layout>::Region>;

fn decode<O: Operation>(header: CallHeader, mut words: &[u64]) -> Result<(ScopeOf<O>, O), Error> {
    let scope = match header.start {
        None => Scope::Whole,
        Some((page, level)) => Scope::Below(Below { page, level, owned: Wire::decode(&mut words)? }),
    };
    let mut operation: O = decode_all(words)?;
    operation.limit();
    Ok((scope, operation))
}

/// Runs an operation and replies.
async fn run<O: Operation>(thread: Rc<Thread>, header: CallHeader, scope: ScopeOf<O>, operation: O, reply: Responder) {
    let one_sided = match thread.structure(header).await {
        Ok(Some(one_sided)) => one_sided,
        Ok(None) => return reply.refuse(Refusal::UnknownKind),
        Err(error) => {
            thread.carried_out(Outcome::Failed, 0).await;
            return reply.send_with(|to| ReplyHeader::of(error).encode(0, to));
        }
    };
    let access = OnServer::<O::Layout>::new(one_sided, thread.server(), scope.clone(), operation.begins());
    let outcome = match scope {
        Scope::Whole => execute(&access, &operation).await.map_err(ReplyHeader::of),
        Scope::Below(below) => from_page(&access, &operation, below).await,
    };
    let pages = access.reads();
    let kind = match &outcome {
        Ok(_) => Outcome::Done,
        Err(ReplyHeader::Declined(_)) => Outcome::Declined,
        Err(_) => Outcome::Failed,
    };
    thread.carried_out(kind, pages).await;
    match outcome {
        Ok(output) => {
            let done = ReplyHeader::Done { changed: access.into_changed() };
            reply.send_with(|to| {
                done.encode(pages, to);
                output.encode(to);
            });
        }
        Err(header) => reply.send_with(|to| header.encode(pages, to)),
    }
}

impl ReplyHeader {
    fn of(error: Error) -> Self {
        Self::Failed(Failure::of(&error))
    }
}

/// Runs an operation from a page on, for as long as nothing but others' changes is in the way.
async fn from_page<O: Operation>(
    access: &OnServer<O::Layout>,
    operation: &O,
    below: Below<<O::Layout as Layout>::Region>,
) -> Result<O::Output, ReplyHeader> {
    let _pin = access.worker().pin();
    for attempt in 0..ATTEMPTS_MAX {
        let outcome = operation.run(access, Start::Page(below.page)).await;
        match (outcome, access.declined()) {
            (Ok(output), _) => return Ok(output),
            (Err(_), Some(why)) => return Err(ReplyHeader::Declined(why)),
            (Err(Interrupt::Restart(Cause::Conflict)), None) => access.worker().back_off(attempt).await,
            (Err(Interrupt::Restart(_)), None) => return Err(ReplyHeader::Declined(Decline::NotThere)),
            (Err(Interrupt::Failed(error)), None) => return Err(ReplyHeader::of(*error)),
            (Err(_), None) => return Err(ReplyHeader::Declined(Decline::Leaves)),
        }
    }
    Err(ReplyHeader::Declined(Decline::Busy))
}
