//! The operations that a memory server knows.

use std::{
    any::Any,
    cell::Cell,
    collections::HashMap,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use farlink_runtime::{
    access::{Access, Cause, Context, InPieces, Interrupt, Operation, Operations, Pieces, Plugin, Start},
    error::Error,
    fencing::UnderWay,
    messaging::{Refusal, Responder},
    operation::{Code, Restarts, execute, kind_of},
    wire::{Wire, decode_all},
};

use super::{
    layout::{ANSWER_WORDS_MAX, At, CallHeader, Failure, ReplyHeader},
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
/// use farlink_structures::{btree::Tree, skiplist::List};
///
/// let registry = Registry::new().with::<Tree>().with::<List>();
/// assert!(registry.len() > 2);
/// ```
#[derive(Clone, Default)]
pub struct Registry {
    operations: HashMap<Code, Begin>,
    /// By the number of the name.
    plugins: HashMap<u64, &'static str>,
}

struct Naming<'a>(&'a mut HashMap<Code, Begin>);

impl<P: Plugin> Operations<P> for Naming<'_> {
    fn add<O: Operation<Plugin = P>>(&mut self) -> &mut Self {
        let before = self.0.insert(Code::of::<O>(), begin::<O>);
        assert!(before.is_none(), "{} has two operations named {}", P::NAME, O::NAME);
        self
    }

    fn add_in_pieces<O: InPieces<Plugin = P>>(&mut self) -> &mut Self {
        const { assert!(O::READS_ONLY, "an answer in pieces is not kept: a repeat is carried out again") };
        self.0.insert(Code::in_pieces::<O>(), begin_in_pieces::<O>);
        self.add::<O>()
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.plugins.values()).finish()
    }
}

impl Registry {
    /// Knows none.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the operations of a plug-in.
    ///
    /// # Panics
    /// If it is there already, or names two operations alike.
    #[must_use]
    pub fn with<P: Plugin>(mut self) -> Self {
        let before = self.plugins.insert(kind_of::<P>(), P::NAME);
        assert!(before.is_none(), "two plug-ins are named {}, or one was added twice", P::NAME);
        P::operations(&mut Naming(&mut self.operations));
        self
    }

    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Begins what a request asks for; refuses what makes no sense, or is not known.
    pub(super) fn begin(&self, thread: &Rc<Thread>, mut words: &[u64], reply: Responder) -> Option<Running> {
        let begun = match CallHeader::decode(&mut words) {
            Err(_) => Err((Refusal::Malformed, reply)),
            Ok(header) => match self.operations.get(&header.code) {
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
    match unpanicked_now(|| decode::<O>(header, words)) {
        Ok(Ok((scope, operation))) => Ok(Box::pin(run(Rc::clone(thread), header, scope, operation, reply))),
        refused => Err((malformed::<O>(refused.err()), reply)),
    }
}

fn begin_in_pieces<O: InPieces>(
    thread: &Rc<Thread>,
    header: CallHeader,
    words: &[u64],
    reply: Responder,
) -> Result<Running, (Refusal, Responder)> {
    match unpanicked_now(|| decode::<O>(header, words)) {
        Ok(Ok((Scope::Whole(_), operation))) => {
            Ok(Box::pin(run_in_pieces(Rc::clone(thread), header, operation, reply)))
        }
        refused => Err((malformed::<O>(refused.err()), reply)),
    }
}

/// Why an operation cannot be read from a message, whose code may have panicked on it.
pub(crate) fn malformed<O: Operation>(panicked: Option<String>) -> Refusal {
    if let Some(why) = panicked {
        tracing::error!(operation = O::NAME, plugin = O::Plugin::NAME, why, "to read an operation panicked");
    }
    Refusal::Malformed
}

type ScopeOf<O> = Scope<<<O as Operation>::Plugin as Plugin>::Region>;

fn decode<O: Operation>(header: CallHeader, mut words: &[u64]) -> Result<(ScopeOf<O>, O), Error> {
    let scope = match header.start {
        At::Root if O::READS_ONLY => Scope::Whole(None),
        At::Root => Scope::Whole(Some(Wire::decode(&mut words)?)),
        At::Above => Scope::Above,
        At::Page(page, level) => {
            let (sender, owned) = Wire::decode(&mut words)?;
            Scope::Below(Below { page, level, sender, owned })
        }
    };
    let mut operation: O = decode_all(words)?;
    operation.limit();
    Ok((scope, operation))
}

/// Runs an operation and replies.
async fn run<O: Operation>(thread: Rc<Thread>, header: CallHeader, scope: ScopeOf<O>, operation: O, reply: Responder) {
    let one_sided = match thread.structure::<O::Plugin>(header.structure).await {
        Ok(Some(one_sided)) => one_sided,
        Ok(None) => return reply.refuse(Refusal::UnknownKind),
        Err(error) => {
            thread.carried_out(Outcome::Failed, 0).await;
            return reply.send_with(|to| ReplyHeader::NotBegun(Failure::of(&error)).encode(0, to));
        }
    };
    let about = match unpanicked_now(|| operation.scope()) {
        Ok(about) => about,
        Err(why) => {
            thread.carried_out(Outcome::Failed, 0).await;
            return reply.send_with(|to| panicked::<O>(why, false).encode(0, to));
        }
    };
    let access = OnServer::<O::Plugin>::new(one_sided, thread.memory(), scope, about);
    let outcome = match begin_change::<O>(&access) {
        Ok(under_way) => {
            let outcome = unpanicked(attempt(&access, &operation)).await;
            access.end_changes().await;
            under_way.into_iter().for_each(UnderWay::end);
            outcome.unwrap_or_else(|why| Err(panicked::<O>(why, access.may_have_changed())))
        }
        Err(declined) => Err(declined),
    };
    let pages = access.reads();
    let kind = match &outcome {
        Ok(_) | Err(ReplyHeader::GoOn(_)) => Outcome::Done,
        Err(ReplyHeader::Declined(_)) => Outcome::Declined,
        Err(_) => Outcome::Failed,
    };
    thread.carried_out(kind, pages).await;
    let outcome = outcome.map(|output| {
        let (changed, path, beside) = access.into_changed_and_read();
        (ReplyHeader::Done { changed, path, beside }, output)
    });
    ReplyHeader::reply(outcome, pages, reply);
}

/// Runs an operation that appends pieces, and replies with those. They stay what they are until they are sent: the epoch is pinned
/// from before the first page is looked at.
async fn run_in_pieces<O: InPieces>(thread: Rc<Thread>, header: CallHeader, operation: O, reply: Responder) {
    let one_sided = match thread.structure::<O::Plugin>(header.structure).await {
        Ok(Some(one_sided)) => one_sided,
        Ok(None) => return reply.refuse(Refusal::UnknownKind),
        Err(error) => {
            thread.carried_out(Outcome::Failed, 0).await;
            return reply.send_with(|to| ReplyHeader::NotBegun(Failure::of(&error)).encode(0, to));
        }
    };
    let sending = thread.sending();
    let reads = Cell::new(0);
    let running = async {
        let (memory, about) = (thread.memory(), operation.scope());
        let access = OnServer::<O::Plugin>::new(one_sided, memory, Scope::Whole(None), about);
        let outcome = collected(&access, &operation).await;
        reads.set(access.reads());
        outcome.map_err(ReplyHeader::of)
    };
    let outcome = unpanicked(running).await.unwrap_or_else(|why| Err(panicked::<O>(why, false)));
    let pages = reads.get();
    thread.carried_out(if outcome.is_ok() { Outcome::Done } else { Outcome::Failed }, pages).await;
    match outcome {
        Ok(pieces) => reply.send_pieces(sending, |to| {
            to.own(|to| ReplyHeader::DONE.encode(pages, to));
            to.append(pieces);
        }),
        Err(failed) => reply.send_with(|to| failed.encode(pages, to)),
    }
}

fn panicked<O: Operation>(why: String, may_have_changed: bool) -> ReplyHeader {
    tracing::error!(operation = O::NAME, plugin = O::Plugin::NAME, why, "a shipped operation panicked");
    ReplyHeader::of(Error::Panicked { what: "a shipped operation", why, may_have_changed })
}

async fn collected<O: InPieces>(access: &OnServer<O::Plugin>, operation: &O) -> Result<Pieces, Error> {
    /// Beside them, a reply has some headers.
    const WORDS_MAX: u64 = ANSWER_WORDS_MAX - 64;
    let Context { worker, structure, .. } = access.context();
    let mut restarts = Restarts::from_root(structure.root);
    loop {
        let mut pieces = Pieces::default();
        match operation.collect(access, &mut pieces).await {
            Ok(()) if pieces.words() as u64 <= WORDS_MAX => return Ok(pieces),
            Ok(()) => return Err(Error::AnswerTooLarge { words: pieces.words() as u64, limit: WORDS_MAX }),
            Err(interrupt) => {
                restarts.start_after(&interrupt);
                restarts.back_off(worker, interrupt).await?;
            }
        }
    }
}

async fn attempt<O: Operation>(access: &OnServer<O::Plugin>, operation: &O) -> Result<O::Output, ReplyHeader> {
    match access.scope().clone() {
        Scope::Whole(_) => execute(access, operation).await.map_err(ReplyHeader::of),
        Scope::Above => above(access, operation).await,
        Scope::Below(below) => from_page(access, operation, below).await,
    }
}

/// Runs a future; what it panics with, if it does, so that its thread goes on. What others see is whole even then: changes are
/// carried out after the code of a structure has computed them. Those that it has made by then stay.
pub(crate) async fn unpanicked<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(message(&*panic))),
    })
    .await
}

/// The same of what waits for nothing.
pub(crate) fn unpanicked_now<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").into()
}

impl ReplyHeader {
    pub(crate) fn of(error: Error) -> Self {
        Self::Failed(Failure::of(&error))
    }

    /// Replies with what an operation has come to.
    pub(crate) fn reply<T: Wire>(outcome: Result<(Self, T), Self>, pages: u32, reply: Responder) {
        match outcome {
            Ok((done, output)) => reply.send_with(|to| {
                let start = to.len();
                done.encode(pages, to);
                let failed = match unpanicked_now(|| output.encode(to)) {
                    Ok(()) => {
                        Some((to.len() - start) as u64).filter(|&words| words > ANSWER_WORDS_MAX).map(Failure::TooLarge)
                    }
                    Err(why) => {
                        tracing::error!(why, "to write an answer panicked");
                        Some(Failure::Other(format!(
                            "to write the answer panicked: {why}; the operation was carried out"
                        )))
                    }
                };
                if let Some(failed) = failed {
                    to.truncate(start);
                    Self::Failed(failed).encode(pages, to);
                }
            }),
            Err(header) => reply.send_with(|to| header.encode(pages, to)),
        }
    }
}

/// Runs an operation from the root for as long as it stays on the inner levels; then it is for the compute server to go on.
async fn above<O: Operation>(access: &OnServer<O::Plugin>, operation: &O) -> Result<O::Output, ReplyHeader> {
    let _pin = access.context().worker.pin();
    for attempt in 0..ATTEMPTS_MAX {
        let outcome = operation.run(access, Start::Root).await;
        match (access.stopped(), outcome) {
            (Some(page), _) => return Err(ReplyHeader::GoOn(page)),
            (None, Ok(output)) => return Ok(output),
            (None, Err(Interrupt::Failed(error))) => return Err(ReplyHeader::of(*error)),
            (None, Err(_)) => access.context().worker.back_off(attempt).await,
        }
    }
    Err(ReplyHeader::GoOn(access.context().structure.root_link()))
}

/// Counts a change for its sender; declines it if that one is fenced off.
fn begin_change<O: Operation>(access: &OnServer<O::Plugin>) -> Result<Option<UnderWay>, ReplyHeader> {
    let sender = match access.scope() {
        Scope::Below(below) => Some(below.sender),
        Scope::Whole(sender) => *sender,
        Scope::Above => None,
    };
    let Some(sender) = sender.filter(|_| !O::READS_ONLY) else { return Ok(None) };
    let member = access.context().worker.owner();
    let under_way = UnderWay::begin(access.memory(), member, sender);
    under_way.map(Some).ok_or(ReplyHeader::Declined(Decline::FencedOff))
}

/// Runs an operation from a page on, for as long as nothing but others' changes is in the way.
async fn from_page<O: Operation>(
    access: &OnServer<O::Plugin>,
    operation: &O,
    below: Below<<O::Plugin as Plugin>::Region>,
) -> Result<O::Output, ReplyHeader> {
    let _pin = access.context().worker.pin();
    for attempt in 0..ATTEMPTS_MAX {
        let outcome = operation.run(access, Start::Page(below.page)).await;
        match (outcome, access.declined()) {
            (Ok(output), _) => return Ok(output),
            (Err(_), Some(why)) => return Err(ReplyHeader::Declined(why)),
            (Err(Interrupt::Restart(Cause::Conflict | Cause::Moved)), None) => {
                access.context().worker.back_off(attempt).await
            }
            (Err(Interrupt::Restart(Cause::Above)), None) => return Err(ReplyHeader::Declined(Decline::Restructures)),
            (Err(Interrupt::Restart(_)), None) => return Err(ReplyHeader::Declined(Decline::NotThere)),
            (Err(Interrupt::Failed(error)), None) => return Err(ReplyHeader::of(*error)),
            (Err(_), None) => return Err(ReplyHeader::Declined(Decline::Leaves)),
        }
    }
    Err(ReplyHeader::Declined(Decline::Busy))
}
