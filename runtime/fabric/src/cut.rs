//! What has arrived of a WRITE that is cut off: its cache lines land in any order, so any of them.

use rand::{RngExt, rngs::StdRng};

use crate::{
    endpoint::{Request, Ticket, Verb},
    memory::LocalMemory,
    ptr::RemotePtr,
};

const LINE_BYTES: u64 = 64;
/// Of a long WRITE so many lines arrive at most, each as requests of its words.
const LINES_MAX: u64 = 16;

/// For each word from an address on, whether it arrives: some lines do, or all, or none.
pub(crate) fn some_lines(at: RemotePtr, words: usize, rng: &mut StdRng) -> Vec<bool> {
    let line_of = |word: usize| (at.offset() % LINE_BYTES + word as u64 * 8) / LINE_BYTES;
    let lines = line_of(words.max(1) - 1) + 1;
    let first = rng.random_range(0..=lines.saturating_sub(LINES_MAX));
    let arrives: Vec<bool> =
        (0..lines).map(|line| (first..first + LINES_MAX).contains(&line) && rng.random()).collect();
    (0..words).map(|word| arrives[line_of(word) as usize]).collect()
}

/// Whether something of it can arrive without the rest.
pub(crate) fn has_parts(verb: &Verb) -> bool {
    matches!(verb, Verb::Write(_) | Verb::Gather(_)) && verb.bytes() > 8
}

/// The words of a WRITE that arrive, each as a request of its own; none of what has one word. `own` is the memory that the poster
/// gathers from.
pub(crate) fn pieces(
    request: &Request,
    own: &LocalMemory,
    arrives: impl FnOnce(usize) -> Vec<bool>,
    mut ticket: impl FnMut() -> Ticket,
) -> Vec<Request> {
    let word = |index: usize| match &request.verb {
        Verb::Write(buffer) => buffer.get(index).copied(),
        Verb::Gather(gather) => gather.word(own, index),
        _ => None,
    };
    if !has_parts(&request.verb) {
        return Vec::new();
    }
    let arrives = arrives(request.verb.bytes() / 8);
    let words = (0..).zip(arrives).filter_map(|(index, arrives)| Some((index, word(index).filter(|_| arrives)?)));
    words
        .map(|(index, word)| Request { ticket: ticket(), at: request.at.word(index), verb: Verb::WriteWord(word) })
        .collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{
        Completion, Done, Endpoint, Fabric,
        buffer::{Buffer, Buffers},
        clock::Clock,
        connection::{ConnectionState, PeerId, far},
        error::Error,
        faulty::{FaultKinds, FaultOptions, FaultyFabric, FaultyListener},
        gather::{Gather, Piece},
        listener::{CONNECTION_BYTES_MIN, Change, ListenOptions, Listener, ServerEndpoint},
        lock::OwnerId,
        mem::{MemFabric, MemOptions},
        mortal::{MortalFabric, Order},
        ptr::ServerId,
        region::Region,
        sync::{Arc, Ordering},
    };

    const WORDS: usize = 32;
    const NASTY: MemOptions = MemOptions {
        latency_ns: 0,
        bandwidth_bytes_per_s: 0,
        nasty: true,
        ordered_writes: true,
        atomic_against_writes: true,
        atomic_against_cpu: true,
        gather_max: 1,
    };

    fn server() -> ServerId {
        ServerId::new(0).unwrap()
    }

    /// In the midst of a line.
    fn at() -> RemotePtr {
        RemotePtr::new(server(), 4096 + 24).unwrap()
    }

    fn memory(options: MemOptions) -> Arc<MemFabric> {
        Arc::new(MemFabric::in_process(vec![Region::anonymous(1 << 16).unwrap()], options))
    }

    fn buffer(buffers: &Buffers, words: usize, word: u64) -> Buffer {
        let mut buffer = buffers.take(words, |_, _| Ok(Default::default())).unwrap();
        buffer.fill(word);
        buffer
    }

    fn completed(endpoint: &mut dyn Endpoint, ticket: Ticket) -> Completion {
        loop {
            let mut completions = Vec::new();
            endpoint.poll(&mut completions);
            let found = completions.pop();
            assert!(completions.is_empty(), "{completions:?}");
            if let Some(completion) = found {
                assert_eq!(completion.ticket, ticket);
                return completion;
            }
        }
    }

    /// Which words are there of a WRITE of ones that failed.
    fn arrived(fabric: &dyn Fabric, memory: &MemFabric) -> Vec<bool> {
        let (buffers, ticket) = (Buffers::default(), Ticket(7));
        let mut endpoint = fabric.endpoint(1, Clock::monotonic()).unwrap();
        endpoint.ring(&mut vec![Request { ticket, at: at(), verb: Verb::Write(buffer(&buffers, WORDS, 1)) }]);
        assert!(completed(&mut *endpoint, ticket).outcome.is_err());
        let words = &memory.raw_words(server())[at().offset() as usize / 8..][..WORDS];
        words.iter().map(|word| word.load(Ordering::Relaxed) == 1).collect()
    }

    /// The number of who comes next.
    fn joined(port: &mut dyn ServerEndpoint) -> ServerId {
        let mut changes = Vec::new();
        loop {
            port.changes(true, &mut changes);
            match changes.pop() {
                Some(Change::Joined { peer, .. }) => return peer,
                Some(left @ Change::Left { .. }) => panic!("{left:?}"),
                None => {}
            }
        }
    }

    /// Whoever trusts a WRITE of which the first word has arrived, or the last one, is wrong.
    fn expect_any_part(kinds: &BTreeSet<Vec<bool>>) {
        let some = |is: fn(bool, bool, bool) -> bool| {
            kinds.iter().any(|words| is(words[0], words[WORDS - 1], words[8..16].iter().any(|&word| word)))
        };
        assert!(some(|first, last, _| first && !last), "the first words alone have never arrived");
        assert!(some(|first, last, _| !first && last), "the last words alone have never arrived");
        assert!(some(|first, last, midst| first && last && !midst), "the midst has never been missing");
        assert!(some(|first, last, midst| !first && !last && midst), "the midst alone has never arrived");
    }

    #[test]
    fn of_a_write_at_which_one_dies_any_part_arrives() {
        for order in [Order::Posted, Order::Lower, Order::Higher] {
            let kinds = (0..200).map(|seed| {
                let memory = memory(MemOptions::default());
                let mortal = MortalFabric::new(memory.clone(), order, true).with_seed(seed);
                mortal.dies_after(0);
                let words = arrived(&mortal, &memory);
                assert_eq!(mortal.since_told(), (1, true));
                words
            });
            expect_any_part(&kinds.collect());
        }
    }

    #[test]
    fn of_a_write_that_fails_any_lines_arrive() {
        for ordered_writes in [true, false] {
            let kinds = (0..400).map(|seed| {
                let memory = memory(MemOptions { ordered_writes, ..NASTY });
                let kinds = FaultKinds { refused: false, done: true, lost: false };
                let options = FaultOptions { kinds, registrations_one_in: 0, ..FaultOptions::one_in(1, seed) };
                let faulty = FaultyFabric::new(memory.clone(), options);
                let words = arrived(&faulty, &memory);
                for line in words[5..].chunks(8) {
                    assert!(line.iter().all(|&word| word == line[0]), "seed {seed}: a line is torn: {words:?}");
                }
                words
            });
            let kinds: BTreeSet<Vec<bool>> = kinds.collect();
            assert!(kinds.contains(&vec![true; WORDS]), "none has arrived whole");
            expect_any_part(&kinds);
        }
    }

    /// The same, put together from words of its own and a piece of the region.
    #[test]
    fn of_a_gathered_write_that_fails_any_lines_arrive() {
        const OWN: usize = 13;
        for ordered_writes in [true, false] {
            let kinds = (0..400).map(|seed| {
                let memory = memory(MemOptions { ordered_writes, gather_max: 2, ..NASTY });
                let first = at().offset() as usize / 8;
                memory.raw_words(server())[first..][..WORDS].iter().for_each(|word| word.store(1, Ordering::Relaxed));
                let listen = ListenOptions { endpoints: 1, connection_bytes: CONNECTION_BYTES_MIN };
                let kinds = FaultKinds { refused: false, done: true, lost: false };
                let options = FaultOptions { kinds, registrations_one_in: 0, ..FaultOptions::one_in(1, seed) };
                let listener = FaultyListener::new(memory.listen(server(), &listen).unwrap(), options);
                let mut port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
                let mut worker = memory.endpoint(2, Clock::monotonic()).unwrap();
                let open = worker.connect(server(), PeerId { owner: OwnerId::new(6).unwrap(), worker: 0 }).unwrap();
                let (peer, buffers) = (joined(&mut *port), Buffers::default());
                let pieces = vec![Piece::Own(0..OWN), Piece::Region(at(), WORDS - OWN)];
                let gather = Verb::Gather(Box::new(Gather::new(buffer(&buffers, OWN, 1), pieces)));
                let (at, ticket) = (far(peer, at().offset()), Ticket(7));
                port.ring(&mut vec![Request { ticket, at, verb: gather }]);
                assert!(completed(&mut *port, ticket).outcome.is_err());
                open[first..][..WORDS].iter().map(|word| word.load(Ordering::Relaxed) == 1).collect()
            });
            let kinds: BTreeSet<Vec<bool>> = kinds.collect();
            assert!(kinds.contains(&vec![true; WORDS]), "none has arrived whole");
            expect_any_part(&kinds);
        }
    }

    /// On one thread: no other one has to come in between.
    #[test]
    fn a_line_may_be_read_while_it_is_written() {
        const LINE: usize = 8;
        let (memory, buffers) = (memory(NASTY), Buffers::default());
        let [mut writer, mut reader] = [1, 2].map(|seed| memory.endpoint(seed, Clock::monotonic()).unwrap());
        let at = RemotePtr::new(server(), 4096).unwrap();
        let mut torn = 0;
        for round in 1..=2000 {
            let write = Request { ticket: Ticket(round), at, verb: Verb::Write(buffer(&buffers, LINE, round)) };
            let read = Request { ticket: Ticket(round), at, verb: Verb::Read(buffer(&buffers, LINE, 0)) };
            writer.ring(&mut vec![write]);
            reader.ring(&mut vec![read]);
            let (mut done, mut copy) = (Vec::new(), Vec::new());
            while done.is_empty() || copy.is_empty() {
                writer.poll(&mut done);
                reader.poll(&mut copy);
            }
            let Ok(Done::Read(words)) = &copy[0].outcome else { panic!("{copy:?}") };
            torn += u64::from(words.iter().any(|&word| word != words[0]));
        }
        assert!(torn > 20, "{torn} of 2000 READs of a line were torn");
    }

    /// A compute server that is dead answers nobody.
    #[test]
    fn a_dead_listener_sends_nothing_and_lets_nobody_in() {
        let (memory, owner) = (memory(MemOptions::default()), OwnerId::new(5).unwrap());
        let mortal = MortalFabric::new(memory.clone(), Order::Posted, false);
        let _claim = mortal.claim(owner).unwrap();
        let listener = mortal.peer_listener(owner, &ListenOptions::default()).unwrap();
        let mut port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
        let mut asker = memory.endpoint(2, Clock::monotonic()).unwrap();
        let number = asker.peer(owner).unwrap();
        let open = asker.connect(number, PeerId { owner: OwnerId::new(6).unwrap(), worker: 0 }).unwrap();
        let peer = joined(&mut *port);
        let answer = |port: &mut dyn Endpoint, word| {
            let (at, ticket) = (far(peer, 0), Ticket(word));
            port.ring(&mut vec![Request { ticket, at, verb: Verb::WriteWord(word) }]);
            (completed(port, ticket).outcome.is_ok(), open[0].load(Ordering::Acquire))
        };
        assert_eq!(answer(&mut *port, 1), (true, 1));
        mortal.dies_after(0);
        assert_eq!(answer(&mut *port, 2), (false, 1));
        assert_eq!(mortal.since_told(), (1, true));
        // Who has asked it learns that, and nobody else gets in.
        assert_eq!(asker.connection_state(number), ConnectionState::Dead);
        let refused = asker.connect(number, PeerId { owner: OwnerId::new(7).unwrap(), worker: 0 });
        assert!(matches!(refused, Err(Error::PeerMissing { .. })), "{refused:?}");
    }
}
