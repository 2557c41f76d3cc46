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
        side.connect(&device, there)?;
    }
    let [mut one, mut other] = sides;
    let wanted = MEASUREMENTS.into_iter().filter(|&name| only.is_none_or(|only| only == name));
    for name in wanted {
        match name {
            "read_8" => report(name, one.read_times(1, iterations)?),
            "read_1024" => report(name, one.read_times(128, iterations)?),
            "compare_swap" => report(name, one.compare_swap_times(iterations)?),
            "write_8_half_ping_pong" => report(name, ping_pong(&mut one, &mut other, iterations)?),
            "read_rate_8" => report_rates(name, &mut one, 1, iterations)?,
            _ => report_rates(name, &mut one, 128, iterations)?,
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

fn report_rates(name: &str, side: &mut Side, words: usize, iterations: usize) -> Result<(), Error> {
    for in_flight in [1, 16] {
        let per_second = side.read_rate(words, in_flight, iterations)?;
        println!(r#"{{"name":"{name}","in_flight":{in_flight},"ops":{iterations},"ops_per_second":{per_second:.0}}}"#);
    }
    Ok(())
}

fn report(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_nanos();
    println!(r#"{{"name":"{name}","ops":{},"p50_ns":{},"p99_ns":{}}}"#, times.len(), at(50), at(99));
}

/// A memory server, and an endpoint to the other side's.
struct Side {
    // The endpoint first: before the buffers that are registered with it.
    endpoint: Option<Box<dyn Endpoint>>,
    buffers: Buffers,
    requests: Vec<Request>,
    completions: Vec<Completion>,
    server: VerbsServer,
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
        Ok(Self { endpoint: None, buffers: Buffers::default(), requests: vec![], completions: vec![], server })
    }

    fn connect(&mut self, device: &DeviceChoice, there: &str) -> Result<(), Error> {
        let options = VerbsOptions { device: device.clone(), ..VerbsOptions::new([there], secret()?) };
        self.endpoint = Some(VerbsFabric::connect(&options)?.endpoint(0, Clock::monotonic())?);
        Ok(())
    }

    fn endpoint(&mut self) -> &mut dyn Endpoint {
        &mut **self.endpoint.as_mut().expect("connected")
    }

    fn buffer(&mut self, words: usize) -> Result<Buffer, Error> {
        let endpoint = self.endpoint.as_mut().expect("connected");
        self.buffers.take(words, |base, words| endpoint.register(base, words))
    }

    fn post(&mut self, verb: Verb) {
        let server = ServerId::new(0).expect("0 is a server id");
        let at = RemotePtr::new(server, AT).expect("an offset");
        let mut requests = std::mem::take(&mut self.requests);
        requests.push(Request { ticket: Ticket(0), at, verb });
        self.requests = requests;
    }

    fn ring(&mut self) {
        let mut requests = std::mem::take(&mut self.requests);
        self.endpoint().ring(&mut requests);
        self.requests = requests;
    }

    fn poll(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        self.endpoint().poll(&mut completions);
        self.completions = completions;
    }

    fn finish(&mut self) -> Result<Done, Error> {
        loop {
            self.poll();
            if let Some(completion) = self.completions.pop() {
                return Ok(completion.outcome?);
            }
        }
    }

    fn times(
        &mut self,
        iterations: usize,
        mut once: impl FnMut(&mut Self) -> Result<(), Error>,
    ) -> Result<Vec<Duration>, Error> {
        (0..WARM_UP).try_for_each(|_| once(self))?;
        let mut times = Vec::with_capacity(iterations);
        let mut before = Instant::now();
        for _ in 0..iterations {
            once(self)?;
            let now = Instant::now();
            times.push(now - before);
            before = now;
        }
        Ok(times)
    }

    fn read_times(&mut self, words: usize, iterations: usize) -> Result<Vec<Duration>, Error> {
        let mut buffer = Some(self.buffer(words)?);
        self.times(iterations, |side| {
            side.post(Verb::Read(buffer.take().expect("it came back")));
            side.ring();
            if let Done::Read(back) = side.finish()? {
                buffer = Some(back);
            }
            Ok(())
        })
    }

    fn compare_swap_times(&mut self, iterations: usize) -> Result<Vec<Duration>, Error> {
        let mut word = 0;
        self.times(iterations, |side| {
            side.post(Verb::CompareSwap { expected: word, new: word + 1 });
            word += 1;
            side.ring();
            side.finish().map(drop)
        })
    }

    /// READs a second with so many in flight.
    fn read_rate(&mut self, words: usize, in_flight: usize, iterations: usize) -> Result<f64, Error> {
        let start = Instant::now();
        for _ in 0..in_flight {
            let buffer = self.buffer(words)?;
            self.post(Verb::Read(buffer));
        }
        self.ring();
        let mut left = iterations;
        while left > 0 {
            self.poll();
            while let Some(completion) = self.completions.pop() {
                left = left.saturating_sub(1);
                if let Done::Read(buffer) = completion.outcome? {
                    self.post(Verb::Read(buffer));
                }
            }
            if !self.requests.is_empty() {
                self.ring();
            }
        }
        let rate = iterations as f64 / start.elapsed().as_secs_f64();
        for _ in 0..in_flight {
            self.finish()?;
        }
        Ok(rate)
    }

    /// Writes `turn` to the other side, which waits for it.
    fn serve_ball(&mut self, turn: u64) -> Result<(), Error> {
        self.post(Verb::WriteWord(turn));
        self.ring();
        self.finish().map(drop)
    }
}

/// Half the time of a WRITE there and a WRITE back, both sides waiting on their memory.
fn ping_pong(one: &mut Side, other: &mut Side, iterations: usize) -> Result<Vec<Duration>, Error> {
    let wait = |server: &VerbsServer, turn: u64| {
        let word = &server.raw_words()[(AT / 8) as usize];
        while word.load(Ordering::Acquire) != turn {
            hint::spin_loop();
        }
    };
    // What the CAS has left there.
    let turns = 1_000_000..1_000_000 + (iterations + WARM_UP) as u64;
    // Endpoints stay on their threads: the other one's is made over there.
    let there = one.server.address().to_string();
    let returner = &mut *other;
    returner.endpoint = None;
    let server = &returner.server;
    let back = turns.clone();
    std::thread::scope(|scope| {
        let returning = scope.spawn(move || {
            let options = VerbsOptions::new([there], secret()?);
            let mut endpoint = VerbsFabric::connect(&options)?.endpoint(0, Clock::monotonic())?;
            let at = RemotePtr::new(ServerId::new(0).expect("0 is a server id"), AT).expect("an offset");
            let (mut requests, mut completions) = (Vec::new(), Vec::new());
            for turn in back {
                wait(server, turn);
                requests.push(Request { ticket: Ticket(0), at, verb: Verb::WriteWord(turn) });
                endpoint.ring(&mut requests);
                while completions.is_empty() {
                    endpoint.poll(&mut completions);
                }
                completions.clear();
            }
            Ok::<_, Error>(())
        });
        let mut turns = turns;
        let times = one.times(iterations, |one| {
            let turn = turns.next().unwrap_or_default();
            one.serve_ball(turn)?;
            wait(&one.server, turn);
            Ok(())
        })?;
        returning.join().expect("the other side panicked")?;
        Ok(times.into_iter().map(|time| time / 2).collect())
    })
}
