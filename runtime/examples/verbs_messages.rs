//! What a request to a memory server's thread and its reply cost over verbs, by both transports, with one in flight and with
//! many, threads that poll and threads that sleep; and what workers cost the memory server by just being there.
//! `verbs_messages [ROUNDS]`; prints one JSON object a line.

use std::{
    fs,
    io::{Read, Write},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{
        link::{ListenOptions, Transport},
        verbs::{Secret, VerbsFabric, VerbsOptions, VerbsServeOptions, VerbsServer},
    },
    messaging::{
        Channel, ChannelOptions, Kind, MessageServer, Priority, Request, Responder, ServeMessages, Service, SwitchOver,
        Wait,
    },
    ptr::ServerId,
    server::DEFAULT_REGION_BYTES,
    worker::Worker,
};

const ECHO: Kind = Kind(1);
/// Announces nothing that this measures.
const INLINE: ChannelOptions = ChannelOptions { switch_over: SwitchOver::Above(4096), coalesce: true };
/// Requests at a time where they are many.
const MANY: usize = 64;

struct Echo;

impl Service for Echo {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        reply.send_words(request.words());
    }
}

/// A counter of SoftRoCE's; 0 where the device has none.
fn counted(name: &str) -> u64 {
    let devices = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let read = |device: fs::DirEntry| fs::read_to_string(device.path().join("ports/1/hw_counters").join(name)).ok();
    devices.filter_map(read).filter_map(|text| text.trim().parse::<u64>().ok()).sum()
}

/// KiB that this process has pinned.
fn pinned_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    line.and_then(|line| line.trim().split(' ').next()?.parse().ok()).unwrap_or(0)
}

async fn measure(
    channel: &Channel,
    (transport, wait): (Transport, Wait),
    words: usize,
    rounds: usize,
) -> Result<(), Error> {
    let params = vec![7; words];
    let mut times_ns = Vec::with_capacity(rounds);
    let packets = counted("sent_pkts");
    for _ in 0..rounds {
        let begun = Instant::now();
        channel.request_words(ECHO, &params, Priority::Latency).await?;
        times_ns.push(begun.elapsed().as_nanos() as u64);
    }
    let packets = counted("sent_pkts") - packets;
    times_ns.sort_unstable();
    let at = |share: f64| times_ns[((times_ns.len() - 1) as f64 * share) as usize];
    println!(
        r#"{{"name":"echo","transport":"{transport}","wait":"{wait:?}","bytes":{},"ops":{rounds},"packets_per_op":{:.2},"p50_ns":{},"p99_ns":{},"max_ns":{}}}"#,
        words * 8,
        packets as f64 / rounds as f64,
        at(0.5),
        at(0.99),
        at(1.0)
    );
    Ok(())
}

async fn measure_many(worker: &Worker, channel: &Channel, transport: Transport, rounds: usize) -> Result<(), Error> {
    let (packets, waits, begun) = (counted("sent_pkts"), counted("send_rnr_err"), Instant::now());
    let tasks: Vec<_> = (0..MANY)
        .map(|_| {
            let channel = channel.clone();
            worker.spawn(async move {
                for _ in 0..rounds.div_ceil(MANY) {
                    channel.request_words(ECHO, &[7; 8], Priority::BestEffort).await?;
                }
                Ok::<(), Error>(())
            })
        })
        .collect();
    for task in tasks {
        task.await?;
    }
    let (ops, seconds) = ((rounds.div_ceil(MANY) * MANY) as f64, begun.elapsed().as_secs_f64());
    println!(
        r#"{{"name":"many","transport":"{transport}","in_flight":{MANY},"ops":{ops},"ops_per_second":{:.0},"packets_per_op":{:.2},"receiver_not_ready":{}}}"#,
        ops / seconds,
        (counted("sent_pkts") - packets) as f64 / ops,
        counted("send_rnr_err") - waits
    );
    Ok(())
}

/// Workers in another process, which do nothing, as many as there were asked for until it is over.
fn idle_workers(address: &str, secret: &str, count: usize) -> Result<(), Error> {
    let fabric = VerbsFabric::connect(&VerbsOptions::new([address], Secret::new(secret)?))?;
    let compute = ComputeServer::join(Arc::new(fabric), ComputeOptions::default())?;
    let id = ServerId::new(0).expect("0 is a number of a server");
    let workers = (0..count).map(|_| compute.worker()).collect::<Result<Vec<_>, Error>>()?;
    for worker in &workers {
        worker.block_on(async { worker.channel_with(id, INLINE).await.map(drop) })?;
    }
    println!("{}", pinned_kib());
    let _ = std::io::stdin().read(&mut [0]);
    Ok(())
}

/// What `count` workers of another process make the memory server pin.
fn pinned_for(server: &VerbsServer, secret: &Secret, transport: Transport, count: usize) -> Result<(), Error> {
    let failed = || |source| Error::Io { what: "running workers in another process".into(), source };
    let before = pinned_kib();
    let listener = server.listen(&ListenOptions { transport, ..ListenOptions::default() })?;
    let messages = MessageServer::start(listener, &ServeMessages::default(), |_| Ok(Box::new(Echo)))?;
    let (address, secret) = (server.address().to_string(), String::from_utf8_lossy(secret.reveal()).into_owned());
    let mut command = Command::new(std::env::current_exe().map_err(failed())?);
    command.args(["idle", &address, &secret, &count.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed())?;
    let mut said = [0; 32];
    let length = child.stdout.as_mut().map_or(Ok(0), |out| out.read(&mut said)).map_err(failed())?;
    println!(
        r#"{{"name":"pinned","transport":"{transport}","workers":{},"server_kib":{},"workers_kib":{}}}"#,
        messages.peers(),
        pinned_kib() - before,
        String::from_utf8_lossy(&said[..length]).trim()
    );
    let _ = child.stdin.take().map(|mut input| input.write_all(b"\n"));
    child.wait().map_err(failed())?;
    Ok(())
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [idle, address, secret, count] = &arguments[..]
        && idle == "idle"
    {
        return idle_workers(address, secret, count.parse().unwrap_or(1));
    }
    let rounds = arguments.first().and_then(|rounds| rounds.parse().ok()).unwrap_or(1000);
    let secret = Secret::random();
    let options = VerbsServeOptions {
        bytes: DEFAULT_REGION_BYTES / 256,
        listen: ([127, 0, 0, 1], 0).into(),
        ..VerbsServeOptions::new(secret.clone())
    };
    let server = VerbsServer::start(&options)?;
    let id = ServerId::new(0).expect("0 is a number of a server");
    for transport in [Transport::Ring, Transport::SendReceive] {
        for count in [1, 16, 64] {
            pinned_for(&server, &secret, transport, count)?;
        }
    }
    let fabric = VerbsFabric::connect(&VerbsOptions::new([server.address().to_string()], secret))?;
    let compute = ComputeServer::join(Arc::new(fabric), ComputeOptions::default())?;
    for wait in [Wait::Poll, Wait::Event] {
        for transport in [Transport::Ring, Transport::SendReceive] {
            // No reports of load among the packets.
            let serve = ServeMessages { wait, report_interval: Duration::from_secs(60), ..ServeMessages::default() };
            let listener = server.listen(&ListenOptions { transport, ..ListenOptions::default() })?;
            let messages = MessageServer::start(listener, &serve, |_| Ok(Box::new(Echo)))?;
            let worker = compute.worker()?;
            worker.block_on(async {
                let channel = worker.channel_with(id, INLINE).await?;
                for words in [1, 64, 1024] {
                    measure(&channel, (transport, wait), words, rounds).await?;
                }
                measure_many(&worker, &channel, transport, 8 * rounds).await
            })?;
            println!("{:?}", messages.counts());
        }
    }
    Ok(())
}
