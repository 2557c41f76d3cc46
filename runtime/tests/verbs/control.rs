//! Who gets in, who does not, and who is dead.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
};

use farlink_runtime::{
    access::{Access, Operations, PagesMut, Plugin, Slot, Words},
    catalog::{self, CreateOptions},
    clock::Clock,
    compute::{ComputeOptions, ComputeServer},
    fabric::{
        Error, Fabric, Liveness, Verb,
        listener::ListenOptions,
        verbs::{DeviceChoice, Secret, VerbsFabric, VerbsOptions, VerbsServeOptions},
    },
    layout::Records,
    lock::OwnerId,
    messaging::{Kind, MessageServer, Priority, Request, Responder, ServeMessages, Service},
    one_sided::Proof,
    page::SizeClass,
    ptr::ServerId,
    report::Report,
    server::serve_verbs,
    structure::{OPTIONS, Structure, StructurePlacement},
    worker::Handle,
};

use crate::scene::{self, FREE, Wire, at, connect, eventually, serve, serve_options};

fn owner(number: u64) -> OwnerId {
    OwnerId::new(number).unwrap()
}

#[test]
fn another_secret_gets_nothing_and_breaks_nothing() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    let mut options = scene::options_to(&[&server]);
    options.secret = Secret::new("another secret, and long enough").unwrap();
    for _ in 0..5 {
        let error = VerbsFabric::connect(&options).unwrap_err();
        assert!(matches!(error, Error::NotAdmitted { .. }) && error.to_string().contains("secret"), "{error}");
    }
    assert_eq!((server.connected(), server.queue_pairs()), (1, 1));
    wire.write(at(0, FREE), &[1]).unwrap();
}

#[test]
fn noise_and_silence_on_the_control_port_break_nothing() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    // More silent ones than are let in unproven; they stay until their time is over.
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    for seed in 0..50u8 {
        let noise: Vec<u8> =
            (0..500u32).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed) ^ seed.rotate_left(3)).collect();
        let Ok(mut stream) = TcpStream::connect(server.address()) else { continue };
        let _ = stream.write_all(&noise);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "noise was answered: {answer:?}");
    }
    assert_eq!(server.connected(), 0);
    // Those who know the secret get in beside others that have just come, at once.
    let silent: Vec<_> = silent.into_iter().map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let fabric = VerbsFabric::connect(&scene::options_to(&[&server])).unwrap();
    Wire::new(&fabric).write(at(0, FREE), &[1]).unwrap();
    drop(silent);
}

#[test]
fn nobody_there_and_no_such_device_say_so() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let mut options = scene::options_to(&[&server]);
    drop(server);
    assert!(matches!(VerbsFabric::connect(&options).unwrap_err(), Error::Unreachable { .. }));
    options.device = DeviceChoice { name: Some("none0".into()), ..DeviceChoice::default() };
    let error = VerbsFabric::connect(&options).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }) && error.to_string().contains("none0"), "{error}");
    let mut options = serve_options(0, 1);
    options.device.port = Some(77);
    assert!(matches!(
        serve_verbs(&options, Records::All),
        Err(farlink_runtime::error::Error::Fabric(Error::NoDevice { .. }))
    ));
    options.device.port = None;
    options.device.gid_index = Some(200);
    assert!(matches!(
        serve_verbs(&options, Records::All),
        Err(farlink_runtime::error::Error::Fabric(Error::NoDevice { .. }))
    ));
}

#[test]
fn a_lost_memory_server_fails_what_is_under_way_and_all_after() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    wire.write(at(0, FREE), &[1]).unwrap();
    drop(server);
    for _ in 0..3 {
        wire.ring((0..10).map(|_| (at(0, FREE), Verb::FetchAdd(1))));
        for completion in wire.wait(10) {
            let error = completion.outcome.unwrap_err();
            assert!(matches!(*error, Error::ServerLost { .. }), "{error}");
        }
        wire.expect_silence();
    }
    assert!(fabric.endpoint(0, farlink_runtime::clock::Clock::monotonic()).is_err());
    assert!(fabric.claim(owner(1)).is_err());
    assert_eq!(fabric.liveness(owner(1)), Liveness::Alive, "nothing proves it dead");
}

#[test]
fn a_loss_is_known_without_a_request() {
    if !scene::has_device() {
        return;
    }
    let [kept, lost] = [0, 1].map(|server| serve_verbs(&serve_options(server, 2), Records::All).unwrap());
    let fabric = connect(&[&kept, &lost]);
    fabric.check_servers().unwrap();
    drop(lost);
    let said = || fabric.check_servers().err();
    eventually("the loss is known", || said().is_some());
    assert!(matches!(said(), Some(Error::ServerLost { server, .. }) if server.index() == 1), "{:?}", said());
}

#[test]
fn claims_live_and_die_with_their_connection_and_stay_dead() {
    if !scene::has_device() {
        return;
    }
    let servers = [0, 1].map(|server| serve_verbs(&serve_options(server, 2), Records::All).unwrap());
    let all = [&servers[0], &servers[1]];
    let watcher = connect(&all);
    let fabric = connect(&all);
    let wire = Wire::new(&fabric);
    assert_eq!(watcher.liveness(owner(7)), Liveness::Dead, "nobody has claimed it");
    let released = fabric.claim(owner(1)).unwrap();
    let kept = fabric.claim(owner(2)).unwrap();
    assert_eq!(watcher.liveness(owner(1)), Liveness::Alive);
    assert!(watcher.claim(owner(1)).unwrap_err().to_string().contains("twice"));
    // The refused claim has taken nothing from its owner.
    assert_eq!(fabric.liveness(owner(1)), Liveness::Alive);
    drop(released);
    assert_eq!(fabric.liveness(owner(2)), Liveness::Alive);
    eventually("a released claim is dead", || watcher.liveness(owner(1)) == Liveness::Dead);
    // The endpoint and the claim keep the connection: then nothing does.
    drop((wire, kept));
    drop(fabric);
    eventually("a lost one is dead", || watcher.liveness(owner(2)) == Liveness::Dead);
    assert!(servers.iter().all(|server| server.queue_pairs() == 0));
    eventually("the connection is forgotten", || servers.iter().all(|server| server.connected() == 1));
    let again = connect(&all);
    assert!(again.claim(owner(2)).unwrap_err().to_string().contains("dead"));
}

/// As little of a structure as there can be.
#[derive(Debug, Clone, Copy, Default)]
struct Nothing;

impl Plugin for Nothing {
    const NAME: &'static str = "nothing";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = SizeClass::SMALLEST.bytes()..=SizeClass::SMALLEST.bytes();
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 0, 1);
    }

    fn operations(_to: &mut impl Operations<Self>) {}

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, farlink_runtime::error::Error> {
        Ok(Report::default())
    }
}

struct Echo;

impl Service for Echo {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        reply.send_words(request.words());
    }
}

/// Changes of several pages, and messages that go in the request and that are fetched.
async fn change_and_talk(worker: &Handle) -> Result<(), farlink_runtime::error::Error> {
    let class = SizeClass::SMALLEST;
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    for name in ["one", "two", "three"] {
        catalog::create::<Nothing>(worker, name, &options, Proof::Checksum).await?;
    }
    catalog::destroy(worker, "two").await?;
    let names: Vec<String> = catalog::list(worker).await?.into_iter().map(|structure| structure.name).collect();
    assert_eq!(names, ["one", "three"]);
    let channel = worker.channel(ServerId::new(0).unwrap()).await?;
    for words in [1, 5000, 100, 3000] {
        let sent: Vec<u64> = (0..words).map(|word| word << 20 | words).collect();
        let reply = channel.request_words(Kind(1), &sent, Priority::Latency).await?;
        assert_eq!(reply.words(), sent, "{words} words");
    }
    Ok(())
}

/// Whoever connects relies on no more order than any of its memory servers, whether it was told itself or not.
#[test]
fn a_cluster_works_over_verbs() {
    if !scene::has_device() {
        return;
    }
    for (at_servers, told) in
        [([true, true], true), ([false, false], true), ([true, false], true), ([true, true], false)]
    {
        let servers = [0, 1].map(|server| {
            let options = VerbsServeOptions { ordered: at_servers[server], ..serve_options(server, 2) };
            serve_verbs(&options, Records::All).unwrap()
        });
        let options = VerbsOptions { ordered: told, ..scene::options_to(&[&servers[0], &servers[1]]) };
        let fabric = Arc::new(VerbsFabric::connect(&options).unwrap());
        let compute = ComputeServer::join(Arc::clone(&fabric) as _, ComputeOptions::default()).unwrap();
        let worker = compute.worker().unwrap();
        // Of all kinds of endpoints there are.
        let ordered = told && at_servers == [true, true];
        assert_eq!(worker.capabilities().ordered_writes, ordered, "{at_servers:?}, {told}");
        let options = ListenOptions::default();
        for (listener, ordered) in
            [(servers[1].listen(&options).unwrap(), at_servers[1]), (compute.listen(&options).unwrap(), ordered)]
        {
            let endpoint = listener.endpoint(0, 0, Clock::monotonic()).unwrap();
            assert_eq!(endpoint.capabilities().ordered_writes, ordered, "{at_servers:?}, {told}");
        }
        let listener = servers[0].listen(&options).unwrap();
        let messages = MessageServer::start(listener, &ServeMessages::default(), |_| Ok(Box::new(Echo))).unwrap();
        worker.block_on(change_and_talk(&worker)).unwrap();
        drop((worker, compute, fabric, messages));
        eventually("all is given back", || servers.iter().all(|server| server.connected() == 0));
    }
}

/// It is cut off, not gone: it must not take itself for alive.
#[test]
fn who_was_taken_for_dead_learns_of_it() {
    if !scene::has_device() {
        return;
    }
    let servers = [0, 1].map(|server| serve_verbs(&serve_options(server, 2), Records::All).unwrap());
    let all = [&servers[0], &servers[1]];
    let (watcher, fabric) = (connect(&all), connect(&all));
    let compute = ComputeServer::join(Arc::clone(&fabric) as _, ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    worker.check_standing().unwrap();
    fabric.abort();
    eventually("it counts as dead", || watcher.liveness(compute.owner()) == Liveness::Dead);
    eventually("it knows", || worker.check_standing().is_err());
    let error = worker.block_on(farlink_runtime::catalog::list(&worker)).unwrap_err();
    assert!(
        matches!(error, farlink_runtime::error::Error::Fabric(Error::TakenForDead { owner }) if owner == compute.owner()),
        "{error}"
    );
}

/// Nobody could break its locks if the other memory server kept it alive.
#[test]
fn who_one_memory_server_has_cut_off_is_dead_to_all() {
    if !scene::has_device() {
        return;
    }
    let servers = [0, 1].map(|server| serve_verbs(&serve_options(server, 2), Records::All).unwrap());
    let all = [&servers[0], &servers[1]];
    let (watcher, fabric) = (connect(&all), connect(&all));
    let compute = ComputeServer::join(Arc::clone(&fabric) as _, ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    worker.check_standing().unwrap();
    fabric.abort_one(ServerId::new(1).unwrap());
    eventually("it knows", || worker.check_standing().is_err());
    eventually("it counts as dead", || watcher.liveness(compute.owner()) == Liveness::Dead);
}

/// Memory servers that are gone have taken nobody for dead.
#[test]
fn without_memory_servers_nobody_is_taken_for_dead() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let compute = ComputeServer::join(Arc::clone(&fabric) as _, ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    drop(server);
    let error = worker.block_on(farlink_runtime::catalog::list(&worker)).unwrap_err();
    assert!(matches!(error, farlink_runtime::error::Error::Fabric(Error::ServerLost { .. })), "{error}");
}
