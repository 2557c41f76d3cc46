//! What an endpoint of the verbs fabric takes, measured as perftest measures the card: one thread, one connection, and the
//! time from one request's posting to the next one's (`ib_read_lat`, `ib_atomic_lat`), half a ping-pong between two sides
//! that spin on memory (`ib_write_lat`), and the rate with a number of requests in flight (`ib_read_bw`).
//!
//! ```text
//! verbs_latency [--device NAME] [--iterations N] [--only MEASUREMENT]
//! ```
//! Prints one JSON object a line: `read_8`, `read_1024`, `compare_swap`, `write_8_half_ping_pong`, `read_rate_8` and
//! `read_rate_1024`, or only one of these.

use std::{
    hint,
    net::Ipv4Addr,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use farlink_runtime::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    error::Error,
    fabric::{
        Completion, Done, Endpoint, Fabric, Request, Ticket, Verb,
        verbs::{DeviceChoice, Secret, VerbsFabric, VerbsOptions, VerbsServeOptions, VerbsServer},
    },
    ptr::{RemotePtr, ServerId},
};

const REGION_BYTES: u64 = 4 << 20;
/// Behind all that the layout uses.
const AT: u64 = 1 << 20;
const WARM_UP: usize = 100;

fn main() -> Result<(), Error> {
    let Arguments { device, iterations, only } = arguments()?;
    let mut sides = [Side::new(&device)?, Side::new(&device)?];
    let addresses = [&sides[0], &sides[1]].map(|side| side.server.address().to_string());
    for (side, there) in sides.iter_mut().zip([&addresses[1], &addresses[0]]) {
        side.line = Some(Line::connect(&device, there)?);
    }
    let [mut one, mut other] = sides;
    let wanted = MEASUREMENTS.into_iter().filter(|&name| only.is_none_or(|only| only == name));
    for name in wanted {
        match name {
            "read_8" => report(name, one.line().read_times(1, iterations)?),
            "read_1024" => report(name, one.line().read_times(128, iterations)?),
            "compare_swap" => report(name, one.line().compare_swap_times(iterations)?),
            "write_8_half_ping_pong" => report(name, ping_pong(&device, &mut one, &mut other, iterations)?),
            "read_rate_8" => report_rates(name, one.line(), 1, iterations)?,
            _ => report_rates(name, one.line(), 128, iterations)?,
        }
    }
    Ok(())
}

const MEASUREMENTS: [&str; 6] =
    ["read_8", "read_1024", "compare_swap", "write_8_half_ping_pong", "read_rate_8", "read_rate_1024"];

struct Arguments {
    device: DeviceChoice,
    iterations: usize,
    only: Option<&'static str>,
}

fn arguments() -> Result<Arguments, Error> {
    let mut given = Arguments { device: DeviceChoice::default(), iterations: 2000, only: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(option) = arguments.next() {
        let value = arguments.next();
        let measurement = MEASUREMENTS.into_iter().find(|&name| Some(name) == value.as_deref());
        match (option.as_str(), value.as_deref().map(|value| (value, value.parse())), measurement) {
            ("--device", Some((name, _)), _) => given.device.name = Some(name.into()),
            ("--iterations", Some((_, Ok(number @ 1..))), _) => given.iterations = number,
            ("--only", _, Some(name)) => given.only = Some(name),
            _ => {
                let why = format!("{option} {}", value.unwrap_or_default());
                let option = "verbs_latency [--device NAME] [--iterations N] [--only MEASUREMENT]";
                return Err(Error::BadOption { option, why });
            }
        }
    }
    Ok(given)
}

fn report_rates(name: &str, line: &mut Line, words: usize, iterations: usize) -> Result<(), Error> {
    for in_flight in [1, 16] {
        let per_second = line.read_rate(words, in_flight, iterations)?;
        println!(r#"{{"name":"{name}","in_flight":{in_flight},"ops":{iterations},"ops_per_second":{per_second:.0}}}"#);
    }
    Ok(())
}

fn report(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_nanos();
    println!(r#"{{"name":"{name}","ops":{},"p50_ns":{},"p99_ns":{}}}"#, times.len(), at(50), at(99));
}

/// A memory server, and a line to the other side's.
struct Side {
    line: Option<Line>,
    server: VerbsServer,
}

/// An endpoint and what one thread needs to use it.
struct Line {
    // Before the buffers that are registered with it.
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
    at: RemotePtr,
    requests: Vec<Request>,
    completions: Vec<Completion>,
}

fn secret() -> Result<Secret, Error> {
    Secret::new("both sides are one process")
}

impl Side {
    fn new(device: &DeviceChoice) -> Result<Self, Error> {
        let server = VerbsServer::start(&VerbsServeOptions {
            bytes: REGION_BYTES,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            device: device.clone(),
            ..VerbsServeOptions::new(secret()?)
        })?;
        Ok(Self { line: None, server })
    }

    fn line(&mut self) -> &mut Line {
        self.line.as_mut().expect("connected")
    }

    /// Waits until the other side has written this to its word.
    fn await_ball(server: &VerbsServer, turn: u64) {
        let word = &server.raw_words()[(AT / 8) as usize];
        while word.load(Ordering::Acquire) != turn {
            hint::spin_loop();
        }
    }
}

impl Line {
    fn connect(device: &DeviceChoice, there: &str) -> Result<Self, Error> {
        let options = VerbsOptions { device: device.clone(), ..VerbsOptions::new([there], secret()?) };
        let server = ServerId::new(0).expect("0 is a server id");
        Ok(Self {
            endpoint: VerbsFabric::connect(&options)?.endpoint(0, Clock::monotonic())?,
            buffers: Buffers::default(),
            at: RemotePtr::new(server, AT).expect("an offset"),
            requests: Vec::new(),
            completions: Vec::new(),
        })
    }

    fn buffer(&mut self, words: usize) -> Result<Buffer, Error> {
        let Self { endpoint, buffers, .. } = self;
        buffers.take(words, |base, words| endpoint.register(base, words))
    }

    #[inline]
    fn post(&mut self, verb: Verb) {
        self.requests.push(Request { ticket: Ticket(0), at: self.at, verb });
    }

    #[inline]
    fn finish(&mut self) -> Result<Done, Error> {
        loop {
            self.endpoint.poll(&mut self.completions);
            if let Some(completion) = self.completions.pop() {
                return Ok(completion.outcome?);
            }
        }
    }

    /// Carries out one request.
    #[inline]
    fn once(&mut self, verb: Verb) -> Result<Done, Error> {
        self.post(verb);
        self.endpoint.ring(&mut self.requests);
        self.finish()
    }

    fn read_times(&mut self, words: usize, iterations: usize) -> Result<Vec<Duration>, Error> {
        let mut buffer = Some(self.buffer(words)?);
        times(iterations, || {
            if let Done::Read(back) = self.once(Verb::Read(buffer.take().expect("it came back")))? {
                buffer = Some(back);
            }
            Ok(())
        })
    }

    fn compare_swap_times(&mut self, iterations: usize) -> Result<Vec<Duration>, Error> {
        let mut word = 0;
        times(iterations, || {
            word += 1;
            self.once(Verb::CompareSwap { expected: word - 1, new: word }).map(drop)
        })
    }

    /// READs a second with so many in flight.
    fn read_rate(&mut self, words: usize, in_flight: usize, iterations: usize) -> Result<f64, Error> {
        let start = Instant::now();
        for _ in 0..in_flight {
            let buffer = self.buffer(words)?;
            self.post(Verb::Read(buffer));
        }
        self.endpoint.ring(&mut self.requests);
        let mut left = iterations;
        while left > 0 {
            self.endpoint.poll(&mut self.completions);
            while let Some(completion) = self.completions.pop() {
                left = left.saturating_sub(1);
                if let Done::Read(buffer) = completion.outcome? {
                    self.post(Verb::Read(buffer));
                }
            }
            if !self.requests.is_empty() {
                self.endpoint.ring(&mut self.requests);
            }
        }
        let rate = iterations as f64 / start.elapsed().as_secs_f64();
        for _ in 0..in_flight {
            self.finish()?;
        }
        Ok(rate)
    }
}

/// The time from each call's end to the next one's. All are measured by the processor's counter, as perftest does, and their
/// sum by the clock: to read the clock each time would take a good part of what is measured.
fn times(iterations: usize, mut once: impl FnMut() -> Result<(), Error>) -> Result<Vec<Duration>, Error> {
    (0..WARM_UP).try_for_each(|_| once())?;
    let mut ends = Vec::with_capacity(iterations + 1);
    let start = Instant::now();
    ends.push(ticks());
    for _ in 0..iterations {
        once()?;
        ends.push(ticks());
    }
    let seconds_per_tick = start.elapsed().as_secs_f64() / ends[iterations].saturating_sub(ends[0]).max(1) as f64;
    // Two processors' counters may be a little apart.
    let time = |pair: &[u64]| Duration::from_secs_f64(pair[1].saturating_sub(pair[0]) as f64 * seconds_per_tick);
    Ok(ends.windows(2).map(time).collect())
}

#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: every processor of this architecture has the counter, and Linux lets programs read it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    START.elapsed().as_nanos() as u64
}

/// Half the time of a WRITE there and a WRITE back, both sides waiting on their memory.
fn ping_pong(
    device: &DeviceChoice,
    one: &mut Side,
    other: &mut Side,
    iterations: usize,
) -> Result<Vec<Duration>, Error> {
    // What the CAS has left there.
    let turns = 1_000_000..1_000_000 + (iterations + WARM_UP) as u64;
    // Endpoints stay on their threads: the other one's is made over there.
    let there = one.server.address().to_string();
    other.line = None;
    let (here, back) = (&other.server, turns.clone());
    std::thread::scope(|scope| {
        let returning = scope.spawn(move || {
            let mut line = Line::connect(device, &there)?;
            for turn in back {
                Side::await_ball(here, turn);
                line.once(Verb::WriteWord(turn))?;
            }
            Ok::<_, Error>(())
        });
        let mut turns = turns;
        let Side { line, server } = one;
        let line = line.as_mut().expect("connected");
        let times = times(iterations, || {
            let turn = turns.next().unwrap_or_default();
            line.once(Verb::WriteWord(turn))?;
            Side::await_ball(server, turn);
            Ok(())
        })?;
        returning.join().expect("the other side panicked")?;
        Ok(times.into_iter().map(|time| time / 2).collect())
    })
}
