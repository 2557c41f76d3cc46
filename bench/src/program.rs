//! The structures that a program knows, whatever they are.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use farlink_offload::{Router, Routes, ShardKey, Sharded, ship::Registry};
use farlink_runtime::access::{Access, Plugin, Structure};
use farlink_runtime::catalog::{self, CreateOptions};
use farlink_runtime::error::Error;
use farlink_runtime::layout::CATALOG_PAGES;
use farlink_runtime::leaks;
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::page::SizeClass;
use farlink_runtime::ptr::ServerId;
use farlink_runtime::report::Report;
use farlink_runtime::structure::{OPTIONS, StructurePlacement};
use farlink_runtime::worker::Worker;

use crate::cluster_view::{self, ClusterView};
use crate::host::{Work, Workers};
use crate::others::{self, Incarnations};
use crate::parts;
use crate::place::Place;
use crate::plan::{Load, PlacementChoice, Plan};
use crate::repartition::{self, Repartitioned, Wish, Written};
use crate::replay::{Trace, TraceOf};
use crate::route;
use crate::signals::{self, Waiting};
use crate::subject::{AccessMode, Samples, Setting, Subject};
use crate::victim::{self, Errand};

/// Somebody who makes a structure takes no longer than this.
const MAKING_LIMIT: Duration = Duration::from_secs(2);
/// How often it is looked whether it is made.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A structure that the program knows: made by [`plugin`] or [`unmeasured`].
#[derive(Clone, Copy)]
pub struct Program {
    kept: &'static dyn Kept,
    known: Option<&'static dyn Known>,
}

/// The structures that the program knows.
pub(crate) type Programs<'a> = &'a [Program];

/// All that the program has for one structure: give it to [`main`](crate::main).
pub fn plugin<S: Subject>() -> Program {
    Program { kept: &Of::<S>(PhantomData), known: Some(&Of::<S>(PhantomData)) }
}

/// A structure that is not measured: `serve` carries out its operations, `check` and `repartition` know it. `bench` and
/// `chaos` take a [`Subject`], as for [`plugin`].
pub fn unmeasured<P: Plugin>() -> Program {
    Program { kept: &Unmeasured::<P>(PhantomData), known: None }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Program").field(&self.name()).finish()
    }
}

impl Program {
    pub(crate) fn name(self) -> &'static str {
        self.kept.kind()
    }

    /// What is measured of it.
    pub(crate) fn known(self) -> Option<&'static dyn Known> {
        self.known
    }
}

fn named<'a>(programs: Programs<'a>, name: &str) -> anyhow::Result<&'a Program> {
    let known = || programs.iter().map(|program| program.name()).collect::<Vec<_>>().join(", ");
    let found = programs.iter().find(|program| program.name() == name);
    found.with_context(|| format!("this program knows no structure `{name}`; it knows {}", known()))
}

/// The one of this name, to be measured.
pub(crate) fn find(programs: Programs<'_>, name: &str) -> anyhow::Result<&'static dyn Known> {
    let known = named(programs, name)?.known;
    known.with_context(|| format!("this program serves and checks a {name}, and does not measure it"))
}

/// The one of this name, whether or not it is measured.
pub(crate) fn find_kept(programs: Programs<'_>, name: &str) -> anyhow::Result<&'static dyn Kept> {
    Ok(named(programs, name)?.kept)
}

/// The operations of all of them.
pub(crate) fn registry(programs: Programs<'_>) -> Registry {
    programs.iter().fold(Registry::new(), |registry, program| program.kept.register(registry))
}

/// What the command line must know of a structure.
pub(crate) trait Kind {
    fn name(&self) -> &'static str;
    fn workloads(&self) -> &'static [&'static str];
    fn workloads_usual(&self) -> &'static [&'static str];
    fn refuses(&self, mode: AccessMode) -> Option<&'static str>;
    fn bulk_loads(&self) -> bool;
    fn has_rounds(&self) -> bool;
    fn has_distribution(&self) -> bool;
    fn returns_many(&self) -> bool;
    fn page_bytes(&self) -> u32;
    fn require_workload(&self, name: &str) -> anyhow::Result<()>;
    fn removes(&self, workload: &str) -> bool;
}

/// What the program does with a structure that is in a cluster.
pub(crate) trait Kept: Sync {
    /// What the catalog calls such a structure.
    fn kind(&self) -> &'static str;

    fn register(&self, registry: Registry) -> Registry;

    /// Looks at every page of a structure of this kind.
    fn check(&self, worker: &Worker, structure: Structure) -> anyhow::Result<Report>;

    /// Frees its pages that are nobody's. How many; none if a compute server holds that up.
    fn free_leaked(&self, worker: &Worker, structure: Structure) -> anyhow::Result<Option<u64>>;

    /// Moves regions of a structure, or shows who has them.
    fn repartition(&self, worker: &Worker, structure: &Structure, wish: &Wish) -> anyhow::Result<Repartitioned>;
}

/// What the program does with a structure that it measures.
pub(crate) trait Known: Kind + Kept {
    /// Reads or computes what is to be loaded.
    fn data(&self, setting: &Setting) -> anyhow::Result<Box<dyn Data>>;

    /// Parses a trace, given as its lines; an error names its line, counted from 1.
    fn trace(&self, lines: &[(u64, String)]) -> anyhow::Result<Box<dyn Trace>>;

    /// Works as one process of a chaos until it is told to stop, and then to leave.
    fn wreak(&self, errand: &Errand, stop: &AtomicBool, may_leave: &Receiver<()>) -> anyhow::Result<()>;

    /// Starts the workers of a compute process.
    fn start(&self, plan: Plan, process: u32, place: &Place, stop: &Arc<AtomicBool>) -> anyhow::Result<Box<dyn Work>>;
}

/// What is to be loaded into a structure.
pub(crate) trait Data {
    fn entries(&self) -> u64;

    /// How many memory servers will have pages of it.
    fn servers(&self, plan: &Plan) -> u32;

    /// Whether the catalog has room for the structures that it is made of, if none else are there.
    fn require_room(&self, plan: &Plan) -> anyhow::Result<()>;

    /// What the user should know of it.
    fn remark(&self) -> Option<String>;

    /// Opens the structure that the plan names, or makes it, and puts into the plan what is known then. `loads`: whether the
    /// data are to be in it.
    fn open_or_create(&self, cluster: &ClusterView, plan: &mut Plan, loads: bool) -> anyhow::Result<()>;

    /// Samples of what the loaded structure answers; nobody changes it meanwhile. It has so many entries.
    fn compare(&self, cluster: &ClusterView, plan: &Plan, entries: u64) -> anyhow::Result<Option<Samples>>;
}

/// The check of a structure in parts.
pub(crate) fn check(kept: &dyn Kept, cluster: &ClusterView, parts: &[String]) -> anyhow::Result<Report> {
    Ok(check_beside(kept, cluster, parts)?.0)
}

/// [`check`], and who may have changed the structure meanwhile.
pub(crate) fn check_beside(
    kept: &dyn Kept,
    cluster: &ClusterView,
    parts: &[String],
) -> anyhow::Result<(Report, Incarnations)> {
    cluster.visit(|worker| {
        let find = |name: &String| worker.block_on(catalog::find(worker, name));
        let structures = parts.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let mut beside = others::living(worker, &structures)?;
        let check = |structure: &Structure| kept.check(worker, structure.clone());
        let reports = structures.iter().map(check).collect::<anyhow::Result<Vec<_>>>()?;
        beside.extend(others::living(worker, &structures)?);
        Ok((cluster_view::sum(reports), beside))
    })
}

/// Frees the pages of a structure that are nobody's, those of a load that was cut off included; how many. `None` as of [`leaks::free`].
fn free_of(worker: &Worker, access: &impl Access) -> anyhow::Result<Option<u64>> {
    let Some(freed) = worker.block_on(leaks::free(access))? else { return Ok(None) };
    match worker.block_on(leaks::free_of_empty(access)) {
        // A load may be under way.
        Err(Error::Owned { .. } | Error::HasUser { .. }) => Ok(Some(freed)),
        more => Ok(Some(freed + more?)),
    }
}

/// Frees the pages of a structure in parts that are nobody's: how many.
pub(crate) fn free_leaked(kept: &dyn Kept, cluster: &ClusterView, parts: &[String]) -> anyhow::Result<u64> {
    cluster.visit(|worker| {
        let free = |name: &String| {
            let freed = kept.free_leaked(worker, worker.block_on(catalog::find(worker, name))?)?;
            freed.with_context(|| {
                format!("the leaked pages of `{name}` are not freed: a compute server that goes on with an operation holds that up")
            })
        };
        parts.iter().map(free).sum()
    })
}

pub(crate) struct Of<S>(pub(crate) PhantomData<fn() -> S>);

impl<S: Subject> Kind for Of<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn workloads(&self) -> &'static [&'static str] {
        S::WORKLOADS
    }

    fn workloads_usual(&self) -> &'static [&'static str] {
        &S::WORKLOADS[..S::WORKLOADS_USUAL.min(S::WORKLOADS.len())]
    }

    fn refuses(&self, mode: AccessMode) -> Option<&'static str> {
        S::refuses(mode)
    }

    fn bulk_loads(&self) -> bool {
        S::BULK_LOADS
    }

    fn has_rounds(&self) -> bool {
        S::HAS_ROUNDS
    }

    fn has_distribution(&self) -> bool {
        S::HAS_DISTRIBUTION
    }

    fn returns_many(&self) -> bool {
        S::RETURNS_MANY
    }

    fn page_bytes(&self) -> u32 {
        S::page_bytes() as u32
    }

    fn require_workload(&self, name: &str) -> anyhow::Result<()> {
        S::require_workload(name)
    }

    fn removes(&self, workload: &str) -> bool {
        S::removes(workload)
    }
}

impl<S: Subject> Kept for Of<S> {
    fn kind(&self) -> &'static str {
        S::NAME
    }

    fn register(&self, registry: Registry) -> Registry {
        registry.with::<S>()
    }

    fn check(&self, worker: &Worker, structure: Structure) -> anyhow::Result<Report> {
        let (root, region) = (structure.root, parts::region::<S::Region>(&structure));
        let access = one_sided::<S>(worker, structure)?;
        let mut report = worker.block_on(S::check(&access))?;
        // A search of a broken structure may not end well.
        if let Some(region) = region.filter(|_| report.is_clean())
            && let Some(stray) = worker.block_on(S::outside(&access, &region))?
        {
            report.add(root, format!("{stray} is in it, and its part is {}", S::show_region(&region)));
        }
        Ok(report)
    }

    fn free_leaked(&self, worker: &Worker, structure: Structure) -> anyhow::Result<Option<u64>> {
        free_of(worker, &one_sided::<S>(worker, structure)?)
    }

    fn repartition(&self, worker: &Worker, structure: &Structure, wish: &Wish) -> anyhow::Result<Repartitioned> {
        let written = Written { parse: S::parse_region, show: S::show_region };
        repartition::repartition::<S::Region>(worker, structure, wish, written)
    }
}

/// As everybody's, if it is of this kind, to look at what is there.
fn one_sided<P: Plugin>(worker: &Worker, structure: Structure) -> anyhow::Result<OneSided<P>> {
    ensure!(structure.kind == P::NAME, "`{}` is a {}, not a {}", structure.name, structure.kind, P::NAME);
    Ok(OneSided::new(worker, structure, Proof::Checksum).beside_owners())
}

struct Unmeasured<P>(PhantomData<fn() -> P>);

impl<P: Plugin> Kept for Unmeasured<P> {
    fn kind(&self) -> &'static str {
        P::NAME
    }

    fn register(&self, registry: Registry) -> Registry {
        registry.with::<P>()
    }

    fn check(&self, worker: &Worker, structure: Structure) -> anyhow::Result<Report> {
        Ok(worker.block_on(P::check(&one_sided::<P>(worker, structure)?))?)
    }

    fn free_leaked(&self, worker: &Worker, structure: Structure) -> anyhow::Result<Option<u64>> {
        free_of(worker, &one_sided::<P>(worker, structure)?)
    }

    fn repartition(&self, worker: &Worker, structure: &Structure, wish: &Wish) -> anyhow::Result<Repartitioned> {
        let written = Written {
            parse: |_| bail!("this program reads no regions of a {}: use --away-from", P::NAME),
            show: |region| format!("{region:?}"),
        };
        repartition::repartition::<P::Region>(worker, structure, wish, written)
    }
}

impl<S: Subject> Known for Of<S> {
    fn data(&self, setting: &Setting) -> anyhow::Result<Box<dyn Data>> {
        Ok(Box::new(DataOf::<S>(S::data(setting)?)))
    }

    fn trace(&self, lines: &[(u64, String)]) -> anyhow::Result<Box<dyn Trace>> {
        let parse = |(number, line): &(u64, String)| {
            let request = S::parse(line).with_context(|| format!("line {number}"))?;
            Ok((line.clone(), request))
        };
        Ok(Box::new(TraceOf::<S>(lines.iter().map(parse).collect::<anyhow::Result<_>>()?)))
    }

    fn wreak(&self, errand: &Errand, stop: &AtomicBool, may_leave: &Receiver<()>) -> anyhow::Result<()> {
        victim::work::<S>(errand, stop, may_leave)
    }

    fn start(&self, plan: Plan, process: u32, place: &Place, stop: &Arc<AtomicBool>) -> anyhow::Result<Box<dyn Work>> {
        Ok(Box::new(Workers::start::<S>(plan, process, place, stop)?))
    }
}

struct DataOf<S: Subject>(S::Data);

impl<S: Subject> DataOf<S> {
    /// All parts, one-sided, to look at what is there.
    fn all(worker: &Worker, parts: Vec<Structure>, cut: ShardKey<S::Region>) -> anyhow::Result<Sharded<OneSided<S>>> {
        let one_sided = |part| OneSided::<S>::new(worker, part, Proof::Checksum).beside_owners();
        Ok(Sharded::new(parts.into_iter().map(one_sided).collect(), cut)?)
    }

    /// What the catalog has of a part, if it is fit for the plan.
    fn opened(worker: &Worker, plan: &Plan, name: &str) -> anyhow::Result<Structure> {
        let found = worker.block_on(catalog::open::<S>(worker, name))?;
        let (bytes, placement) = (found.class.bytes() as u32, PlacementChoice::from(found.policy));
        ensure!(
            !plan.is_page_bytes_given || plan.page_bytes == bytes,
            "`{name}` is there, with pages of {bytes} bytes and not {}; leave --page-bytes out, or give another --name",
            plan.page_bytes
        );
        ensure!(
            !plan.is_placement_given || plan.placement == placement,
            "`{name}` is there, placed as {placement} and not {}; leave --placement out, or give another --name",
            plan.placement
        );
        ensure!(
            placement.is_fit_for(plan.access),
            "`{name}` is there, placed as {placement}: not for --access {}; give another --name",
            plan.access
        );
        Ok(found)
    }
}

impl<S: Subject> Data for DataOf<S> {
    fn entries(&self) -> u64 {
        S::entries(&self.0)
    }

    fn servers(&self, plan: &Plan) -> u32 {
        match plan.placement {
            // Each part is where its root is.
            PlacementChoice::OneServer => plan.servers.min(route::cut::<S>(&self.0, plan).parts() as u32),
            _ => plan.servers,
        }
    }

    fn require_room(&self, plan: &Plan) -> anyhow::Result<()> {
        let (parts, room) = (route::cut::<S>(&self.0, plan).parts(), CATALOG_PAGES - 1);
        // Those of a cluster that is there are as many as they are.
        let of = if plan.access.is_divided() { "memory servers" } else { "--processes" };
        ensure!(
            parts <= room,
            "--access {} with so many {of} makes {parts} structures of it, and a cluster has room for {room}",
            plan.access
        );
        Ok(())
    }

    fn remark(&self) -> Option<String> {
        S::remark(&self.0)
    }

    fn open_or_create(&self, cluster: &ClusterView, plan: &mut Plan, loads: bool) -> anyhow::Result<()> {
        plan.servers = cluster.servers();
        self.require_room(plan)?;
        let deadline = Instant::now() + MAKING_LIMIT;
        loop {
            match self.try_open_or_create(cluster, plan, loads)? {
                Err(_) if Instant::now() < deadline => thread::sleep(LOOK_EVERY),
                opened => return opened,
            }
        }
    }

    fn compare(&self, cluster: &ClusterView, plan: &Plan, entries: u64) -> anyhow::Result<Option<Samples>> {
        cluster.visit(|worker| {
            let open = |name: &String| worker.block_on(catalog::open::<S>(worker, name));
            let parts = plan.parts.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            let cut = parts::cut::<S>(&self.0, plan, &parts)?;
            let all = Self::all(worker, parts, cut)?;
            Ok(worker.block_on(S::compare(&all, &self.0, entries > S::entries(&self.0)))?)
        })
    }
}

impl<S: Subject> DataOf<S> {
    /// The inner error is one that passes if somebody makes the structure just now.
    fn try_open_or_create(
        &self,
        cluster: &ClusterView,
        plan: &mut Plan,
        loads: bool,
    ) -> anyhow::Result<anyhow::Result<()>> {
        let cut = route::cut::<S>(&self.0, plan);
        cluster.visit(|worker| {
            plan.setting.run = worker.owner().incarnation();
            let all = worker.block_on(catalog::list(worker))?;
            plan.parts = vec![plan.name.clone()];
            if plan.access.is_divided() || cut.parts() > 1 {
                let first = format!("{}.0", plan.name);
                let found = all.iter().find(|structure| plan.access.is_divided() && structure.name == first);
                let count = found.and_then(parts::count).unwrap_or(cut.parts());
                plan.parts = (0..count).map(|part| format!("{}.{part}", plan.name)).collect();
            }
            let is_there = |name: &String| all.iter().any(|structure| structure.name == *name);
            let count = plan.parts.iter().filter(|name| is_there(name)).count();
            let is_one_of_several = is_there(&format!("{}.0", plan.name));
            ensure!(
                count > 0 || !(plan.access.owns() && plan.parts.len() == 1 && is_one_of_several),
                "`{}` is in several parts; give it as many --processes as before, or another --name",
                plan.name
            );
            if count == 0 {
                // One that has only some of its parts could not be used.
                let _making = plan.is_connected().then(Waiting::begin);
                // Of a signal just before, this program may end at any moment.
                ensure!(signals::stopped().is_none(), "it was told to end before it had made `{}`", plan.name);
                let class =
                    SizeClass::of_bytes(plan.page_bytes as usize).context("--page-bytes is no size of a page")?;
                for (part, name) in plan.parts.iter().enumerate() {
                    let root = if plan.access.is_divided() { ServerId::new(part as u16) } else { None };
                    let placement = StructurePlacement { policy: plan.placement.policy(), root };
                    let options = match plan.parts.len() {
                        1 => [0; OPTIONS],
                        _ => parts::options(&cut, part),
                    };
                    let options = CreateOptions { class, placement, options };
                    match worker.block_on(S::make(worker, name, &options)) {
                        Err(error @ Error::NameTaken { .. }) => return Ok(Err(error.into())),
                        made => made?,
                    };
                }
                return Ok(Ok(()));
            }
            if let Some(missing) = plan.parts.iter().find(|name| !is_there(name)) {
                return Ok(Err(anyhow!("`{missing}` is not there, and its other parts are; give another --name")));
            }
            let next = format!("{}.{count}", plan.name);
            ensure!(
                plan.parts == [plan.name.as_str()] || !is_there(&next),
                "`{}` is in more parts than {count}; give it as many --processes as before, or another --name",
                plan.name
            );
            let mut found = Vec::new();
            for name in &plan.parts {
                found.push(Self::opened(worker, plan, name)?);
            }
            let first = found.first().context("a structure has parts")?;
            let cut = parts::cut::<S>(&self.0, plan, &found)?;
            (plan.page_bytes, plan.placement) = (first.class.bytes() as u32, first.policy.into());
            let others = others::living(worker, &found)?;
            plan.joins_owners = plan.access.owns() && others::own_and_serve::<S::Region>(worker, &found)?;
            let mut is_found = !others.is_empty();
            // Beside others it may seem broken, or empty.
            for structure in found.iter().filter(|_| others.is_empty()) {
                let known = Of::<S>(PhantomData);
                let mut report = known.check(worker, structure.clone())?;
                if report.entries == 0 && !report.audit.leaked.is_empty() {
                    // A load was cut off.
                    known.free_leaked(worker, structure.clone())?;
                    report = known.check(worker, structure.clone())?;
                }
                if let Some(problem) = cluster_view::problem(&report) {
                    bail!("`{}` is broken: {problem}", structure.name);
                }
                is_found |= report.entries > 0;
            }
            if loads && is_found {
                plan.load = Load::Found;
                let loaded = match plan.joins_owners {
                    // What is in remote memory is old, and pages of it may not fit together.
                    true => {
                        let routed = |part| -> Result<_, Error> {
                            Ok(Router::to_owners(worker, &worker.block_on(Routes::read(worker, part))?))
                        };
                        let routers = found.into_iter().map(routed).collect::<Result<_, _>>()?;
                        worker.block_on(S::require_loaded(&Sharded::new(routers, cut)?, &self.0))
                    }
                    false => worker.block_on(S::require_loaded(&Self::all(worker, found, cut)?, &self.0)),
                };
                if !others.is_empty() {
                    let who = others::name(&others);
                    return Ok(Ok(loaded.with_context(|| others::loads_or_uses(&plan.name, &who))?));
                }
                loaded.with_context(|| format!("the structure `{}`", plan.name))?;
            }
            Ok(Ok(()))
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use farlink_runtime::{fabric::mem::MemOptions, server::in_process};
    use farlink_structures::btree::{BTree, Tree};

    use super::*;
    use crate::args::{Cli, Command};

    const TREE: Of<Tree> = Of(PhantomData);

    /// Opens or makes what these arguments of a bench mean; the plan then.
    fn opened(cluster: &ClusterView, args: &str) -> anyhow::Result<(Plan, Box<dyn Data>)> {
        let line = ["farlink", "bench"].into_iter().chain(args.split_whitespace());
        let Command::Bench(args) = Cli::try_parse_from(line)?.command else { bail!("no bench") };
        let mut plan = args.plan(&TREE)?;
        let data = TREE.data(&plan.setting)?;
        data.open_or_create(cluster, &mut plan, args.loads_keys())?;
        Ok((plan, data))
    }

    /// A server that has all pages of a structure needs memory for all of them.
    #[test]
    fn memory_is_divided_among_those_servers_alone_that_have_pages() {
        let servers = |known: &dyn Known, args: &str| {
            let line = ["farlink", "bench", "--servers", "8", "--keys", "1000"].into_iter();
            let line = line.chain(args.split_whitespace());
            let Command::Bench(args) = Cli::try_parse_from(line).unwrap().command else { panic!("no bench") };
            let plan = args.plan(known).unwrap();
            known.data(&plan.setting).unwrap().servers(&plan)
        };
        let rects: Of<farlink_structures::rtree::Tree> = Of(PhantomData);
        assert_eq!(servers(&TREE, "--access one-sided"), 8);
        assert_eq!(servers(&TREE, "--access coarse"), 8);
        assert_eq!(servers(&TREE, "--access adaptive"), 1);
        assert_eq!(servers(&TREE, "--access cached --placement one-server"), 1);
        assert_eq!(servers(&rects, "--access coarse"), 1);
        assert_eq!(servers(&rects, "--access one-sided"), 8);
        // A bulk-loaded tree takes 19.3 bytes a key.
        assert!(
            crate::cluster::default_server_bytes(20_000_000, 8, servers(&TREE, "--access adaptive")) > 20_000_000 * 20
        );
    }

    /// A trace has no keys of its own, or few.
    #[test]
    fn parts_stay_cut_where_they_were_when_they_were_made() {
        let cluster = ClusterView::new(Arc::new(in_process(2, 16 << 20, MemOptions::default()).unwrap()));
        let cut = |args: &str| {
            let (plan, _) = opened(&cluster, args)?;
            let data = Tree::data(&plan.setting)?;
            cluster.visit(|worker| {
                let open = |name: &String| worker.block_on(catalog::open::<Tree>(worker, name));
                let parts = plan.parts.iter().map(open).collect::<Result<Vec<_>, _>>()?;
                Ok((plan.parts.clone(), parts::cut::<Tree>(&data, &plan, &parts)?))
            })
        };
        let (names, made) = cut("--access coarse --keys 100 --seed 3").unwrap();
        assert_eq!(names, ["bench.0", "bench.1"]);
        let placed = "--placement one-server";
        for others in
            ["--access coarse --keys 1", "--access coarse --trace t", &format!("--access hybrid {placed} --keys 7")]
        {
            let (again, cut) = cut(others).unwrap();
            assert_eq!((&again, format!("{cut:?}")), (&names, format!("{made:?}")), "{others}");
        }
        // A structure that was never a part of one, with the name of one.
        cluster
            .visit(|worker| {
                worker.block_on(catalog::destroy(worker, "bench.0"))?;
                let options = CreateOptions {
                    class: SizeClass::of_bytes(1024).context("a size")?,
                    placement: StructurePlacement {
                        policy: PlacementChoice::OneServer.policy(),
                        root: ServerId::new(0),
                    },
                    options: [0; OPTIONS],
                };
                Ok(worker.block_on(Tree::make(worker, "bench.0", &options))?)
            })
            .unwrap();
        let error = cut("--access coarse --keys 100 --seed 3").unwrap_err().to_string();
        assert!(error.contains("`bench.0` does not say which part of `bench` it is"), "{error}");
    }

    #[test]
    fn a_key_in_another_part_than_its_own_is_found() {
        let cluster = ClusterView::new(Arc::new(in_process(2, 16 << 20, MemOptions::default()).unwrap()));
        let (plan, _) = opened(&cluster, "--access coarse --keys 100").unwrap();
        let check = || check(&TREE, &cluster, &plan.parts).unwrap();
        assert!(check().is_clean());
        for (part, key) in [(0, u64::MAX), (1, 0)] {
            let put_or_remove = |puts| {
                cluster.visit(|worker| {
                    let tree = worker.block_on(BTree::open(worker, &plan.parts[part], Proof::Checksum))?;
                    match puts {
                        true => worker.block_on(tree.insert(key, 1)).map(drop)?,
                        false => worker.block_on(tree.remove(key)).map(drop)?,
                    }
                    Ok(())
                })
            };
            put_or_remove(true).unwrap();
            let problem = cluster_view::problem(&check()).unwrap();
            assert!(problem.contains(&format!("key {key} is in it, and its part is")), "{problem}");
            put_or_remove(false).unwrap();
            assert!(check().is_clean());
        }
    }
}
