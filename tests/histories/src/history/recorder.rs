//! Recording: clocks are read and cells written around each operation.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    sync::atomic::{Ordering, fence},
};

use super::{
    FILE_EXTENSION, HistoryError, NEVER_NS, Op, Outcome, Record,
    cells::{KIND_DONE, KIND_INVOKED, encode_record, header_cell},
    now_ns,
};

/// When a [`Recorder`] passes its cells on to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// When its buffer is full: for processes that are not killed.
    WhenFull,
    /// Before each operation starts: for processes that may be killed. Costs a system call for each operation.
    Invocations,
}

/// An operation that has begun and not ended.
#[derive(Debug)]
#[must_use = "an operation whose ticket is dropped has an unknown outcome"]
pub struct Ticket {
    seq: u64,
}

/// Appends the operations of one client to a file. It is shared by the tasks of one thread.
pub struct Recorder<W: Write> {
    client: u32,
    flush: Flush,
    state: RefCell<RecorderState<W>>,
}

struct RecorderState<W> {
    /// `None` once finished.
    out: Option<W>,
    seq_next: u64,
    /// What has begun and not ended: operation and invocation time.
    open: HashMap<u64, (Op, u64)>,
}

impl<W: Write> fmt::Debug for Recorder<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("client", &self.client).field("flush", &self.flush).finish_non_exhaustive()
    }
}

impl Recorder<BufWriter<File>> {
    /// Creates the history file of one client, called after it, in a directory.
    pub fn in_dir(directory: &Path, client: u32, flush: Flush) -> Result<Self, HistoryError> {
        let path = directory.join(format!("client-{client:06}.{FILE_EXTENSION}"));
        let file = File::create_new(&path).map_err(|cause| HistoryError::Io { path, cause })?;
        Self::new(BufWriter::with_capacity(1 << 16, file), client, flush)
    }
}

impl<W: Write> Recorder<W> {
    /// Starts a history in `out` and writes the header.
    pub fn new(mut out: W, client: u32, flush: Flush) -> Result<Self, HistoryError> {
        out.write_all(&header_cell()).map_err(HistoryError::Append)?;
        if flush == Flush::Invocations {
            out.flush().map_err(HistoryError::Append)?;
        }
        let state = RecorderState { out: Some(out), seq_next: 0, open: HashMap::new() };
        Ok(Self { client, flush, state: RefCell::new(state) })
    }

    /// Notes that an operation is about to start.
    pub fn begin(&self, op: Op) -> Result<Ticket, HistoryError> {
        let invoked_ns = now_ns();
        let mut state = self.state.borrow_mut();
        let seq = state.seq_next;
        if self.flush == Flush::Invocations {
            let record =
                Record { client: self.client, op, outcome: Outcome::Unknown, invoked_ns, returned_ns: NEVER_NS };
            let out = state.out.as_mut().ok_or_else(finished)?;
            encode_record(KIND_INVOKED, seq, &record, out).and_then(|()| out.flush()).map_err(HistoryError::Append)?;
        }
        state.seq_next += 1;
        state.open.insert(seq, (op, invoked_ns));
        drop(state);
        fence(Ordering::SeqCst);
        Ok(Ticket { seq })
    }

    /// Notes what an operation returned. With [`Outcome::Unknown`], that it ended and nobody knows what it did.
    pub fn end(&self, ticket: Ticket, outcome: Outcome) -> Result<(), HistoryError> {
        fence(Ordering::SeqCst);
        let ended_ns = now_ns();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (op, invoked_ns) = state.open.remove(&ticket.seq).ok_or_else(finished)?;
        let returned_ns = if outcome == Outcome::Unknown { NEVER_NS } else { ended_ns };
        let record = Record { client: self.client, op, outcome, invoked_ns, returned_ns };
        let out = state.out.as_mut().ok_or_else(finished)?;
        encode_record(KIND_DONE, ticket.seq, &record, out).map_err(HistoryError::Append)
    }

    /// Ends the history; operations that have not ended get an unknown outcome.
    pub fn finish(self) -> Result<W, HistoryError> {
        self.close()
    }

    fn close(&self) -> Result<W, HistoryError> {
        let mut state = self.state.borrow_mut();
        let mut out = state.out.take().ok_or_else(finished)?;
        let mut open: Vec<_> = state.open.drain().collect();
        open.sort_unstable_by_key(|(seq, _)| *seq);
        for (seq, (op, invoked_ns)) in open {
            let record =
                Record { client: self.client, op, outcome: Outcome::Unknown, invoked_ns, returned_ns: NEVER_NS };
            encode_record(KIND_DONE, seq, &record, &mut out).map_err(HistoryError::Append)?;
        }
        out.flush().map_err(HistoryError::Append)?;
        Ok(out)
    }
}

impl<W: Write> Drop for Recorder<W> {
    fn drop(&mut self) {
        // Whoever cares for errors has called `finish`; what is lost here would only be unknown outcomes.
        let _ = self.close();
    }
}

fn finished() -> HistoryError {
    HistoryError::Append(io::Error::other("the recorder is finished, or the ticket is another recorder's"))
}
