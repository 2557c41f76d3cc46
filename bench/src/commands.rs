//! The commands of the program.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use farlink_children::{Scratch, say};
use farlink_runtime::catalog;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::server::{MemoryServer, ServeOptions};

use crate::args::{BenchArgs, CheckArgs, DropArgs, FabricChoice, ListArgs, RepartitionArgs, ServeArgs};
use crate::bench::{self, Beside, Run};
use crate::cluster::{self, Cluster};
use crate::cluster_view::{self, ClusterView};
use crate::input::{self, InputFile};
use crate::others;
use crate::place::Place;
use crate::plan::{PlacementChoice, Plan};
use crate::program::{self, Known, Programs};
use crate::repartition::{RegionRow, Repartitioned, Wish};
use crate::replay::Trace;
use crate::report::{Reporter, Row};
use crate::serve::{self, StopSignals, announce_ready};
use crate::signals::{self, Waiting};
use crate::table::Columns;
use crate::units::plural;
use crate::{compute, host, verbs};

/// `farlink serve`.
pub(crate) fn serve(programs: Programs<'_>, args: &ServeArgs) -> anyhow::Result<()> {
    args.validate()?;
    let registry = program::registry(programs);
    let Some(dir) = args.dir.clone().filter(|_| args.fabric == FabricChoice::Mem) else {
        return verbs::serve(args, registry);
    };
    let signals = StopSignals::watch()?;
    let server = MemoryServer::start(&ServeOptions {
        dir: dir.clone(),
        server: args.server as usize,
        servers: args.servers as usize,
        bytes: args.bytes,
        ephemeral: args.ephemeral,
        records: args.records,
    })?;
    let shipping = match args.threads {
        0 => None,
        _ => Some(serve::ship(&server, &dir, args, registry)?),
    };
    announce_ready(&mut io::stdout(), args.server)?;
    let ended = signals.wait(|| server.check());
    // Leaves the cluster before its memory goes.
    drop(shipping);
    drop(server);
    Ok(ended?)
}

/// `farlink repartition`.
pub(crate) fn repartition(programs: Programs<'_>, args: &RepartitionArgs) -> anyhow::Result<()> {
    let cluster = ClusterView::new(args.cluster.open()?);
    let mut reporter = Reporter::new(io::stdout().lock(), args.json);
    let structure = cluster.visit(|worker| Ok(worker.block_on(catalog::find(worker, &args.name))?))?;
    let kept = program::find_kept(programs, &structure.kind)?;
    let RepartitionArgs { region, away_from, balance, to, .. } = args.clone();
    let wish = Wish { region, away_from, balance, to };
    let Repartitioned { moved, map, unowned, epoch, problem } =
        cluster.visit(|worker| kept.repartition(worker, &structure, &wish))?;
    let fields = |row: &RegionRow| {
        let value = |number: Option<u64>| number.map_or(serde_json::Value::Null, Into::into);
        vec![
            ("region", row.region.clone().into()),
            ("owner", row.owner.into()),
            ("from", value(row.from.map(u64::from))),
            ("uses", value(row.uses.ok())),
        ]
    };
    for row in &moved {
        let from = row.from.unwrap_or_default();
        let line = format!("moved {} from {from} to {}", row.region, row.owner);
        reporter.record("moved", fields(row), &line)?;
    }
    if !map.is_empty() {
        reporter.note(&format!("`{}`, epoch {epoch}:", args.name))?;
    } else if problem.is_none() {
        reporter.note(&format!("nobody owns anything of `{}` (epoch {epoch})", args.name))?;
    }
    for row in &map {
        let uses = row.uses.map_or_else(str::to_owned, |uses| format!("{uses} uses"));
        reporter.record("region", fields(row), &format!("  {}: compute server {}, {uses}", row.region, row.owner))?;
    }
    for region in unowned {
        reporter.record("unowned", vec![("region", region.clone().into())], &format!("  {region}: nobody"))?;
    }
    problem.map_or(Ok(()), Err)
}

/// `farlink check`.
pub(crate) fn check(programs: Programs<'_>, args: &CheckArgs) -> anyhow::Result<()> {
    let cluster = ClusterView::new(args.cluster.open()?);
    let mut reporter = Reporter::new(io::stdout().lock(), args.json);
    let mut structures = cluster.structures()?;
    if let Some(name) = &args.name {
        // An error that names all there are.
        cluster.visit(|worker| Ok(worker.block_on(catalog::find(worker, name))?))?;
        structures.retain(|structure| structure.name == *name);
    }
    if structures.is_empty() {
        reporter.note("there are no structures in this cluster")?;
    }
    let mut unknown = Vec::new();
    for structure in structures {
        let (name, kind) = (structure.name.clone(), structure.kind.clone());
        match program::find_kept(programs, &kind) {
            Ok(kept) => {
                if args.free_leaked {
                    let freed = program::free_leaked(kept, &cluster, std::slice::from_ref(&name))?;
                    let fields = vec![("structure", name.clone().into()), ("pages", freed.into())];
                    reporter.record("freed", fields, &format!("{freed} leaked pages of `{name}` are freed"))?;
                }
                let (report, others) = program::check_beside(kept, &cluster, std::slice::from_ref(&name))?;
                let mut row = cluster_view::check_row(&kind, &name, &report);
                if !others.is_empty() {
                    row = row.explained(&others::likely_cause(&name, &others));
                }
                reporter.check(&row)?;
            }
            Err(_) => {
                let line = format!("`{name}` is a {kind}: it takes a program that knows those to check it");
                reporter.record("unknown", vec![("name", name.clone().into()), ("structure", kind.into())], &line)?;
                unknown.push(name);
            }
        }
    }
    reporter.all_held()?;
    // What was asked for by name was not done.
    ensure!(args.name.is_none() || unknown.is_empty(), "`{}` was not checked", unknown.join("`, `"));
    Ok(())
}

/// `farlink list`.
pub(crate) fn list(programs: Programs<'_>, args: &ListArgs) -> anyhow::Result<()> {
    let mut reporter = Reporter::new(io::stdout().lock(), args.json);
    let Some(cluster) = args.cluster()? else {
        for program in programs {
            let (name, workloads) = (program.name(), program.known().map_or(&[][..], |known| known.workloads()));
            let fields = vec![("name", name.into()), ("workloads", workloads.to_vec().into())];
            let line = match workloads {
                [] => format!("{name}\n  not measured: for serve, check and repartition"),
                _ => format!("{name}\n  workloads: {}", workloads.join(", ")),
            };
            reporter.record("plugin", fields, &line)?;
        }
        return Ok(());
    };
    let structures = ClusterView::new(cluster.open()?).structures()?;
    if structures.is_empty() {
        reporter.note("there are no structures in this cluster")?;
    }
    for structure in structures {
        let placement = PlacementChoice::from(structure.policy).to_string();
        let bytes = structure.class.bytes();
        let line = format!("{}: {}, pages of {bytes} B, {placement}", structure.name, structure.kind);
        let fields = vec![
            ("name", structure.name.into()),
            ("structure", structure.kind.into()),
            ("page_bytes", bytes.into()),
            ("placement", placement.into()),
            ("root_server", structure.root.server().index().into()),
        ];
        reporter.record("structure", fields, &line)?;
    }
    Ok(())
}

/// `farlink drop`.
pub(crate) fn drop_structure(args: &DropArgs) -> anyhow::Result<()> {
    let cluster = ClusterView::new(args.cluster.open()?);
    let name = &args.name;
    let pages = cluster.visit(|worker| Ok(worker.block_on(catalog::destroy(worker, name))?))?;
    let fields = vec![("name", name.clone().into()), ("pages", pages.into())];
    let mut reporter = Reporter::new(io::stdout().lock(), args.json);
    Ok(reporter.record("dropped", fields, &format!("dropped {name}: {} freed", plural(pages, "page")))?)
}

/// `farlink compute`: the bench is told what went wrong, and reports it. Answers whether all went well.
pub(crate) fn compute(programs: Programs<'_>) -> anyhow::Result<bool> {
    compute::end_with_a_panic();
    let stop = host::watch_for_stop()?;
    compute::obey(programs, &mut io::stdin().lock(), &mut io::stdout(), &stop)
}

/// A bench that is ready to begin.
struct Prepared<'a> {
    known: &'a dyn Known,
    plan: Plan,
    data: Box<dyn program::Data>,
    trace: Option<Box<dyn Trace>>,
    /// Whether the data are loaded: always for workloads, for a trace only if they were asked for.
    loads: bool,
    args: &'a BenchArgs,
    /// What is loaded, if it came through a pipe.
    _spool: [Option<Scratch>; 2],
}

/// `farlink bench`. Everything that a user can get wrong comes to light before anything is started.
pub(crate) fn bench(programs: Programs<'_>, args: &BenchArgs) -> anyhow::Result<()> {
    let known = program::find(programs, args.structure(programs)?)?;
    let mut plan = args.plan(known)?;
    let there = args.connect.as_ref().map(|address| Place::new(address, &args.verbs)).transpose()?;
    signals::watch()?;
    let trace = args.trace.as_deref().map(|path| read_trace(known, path)).transpose()?;
    let take = |path: &Option<PathBuf>, what| match path {
        Some(path) => InputFile::take(path, what).map(|(file, copy)| (Some(file), copy)),
        None => Ok((None, None)),
    };
    let (keys, rects) = (take(&args.keys_file, "keys")?, take(&args.rects_file, "rectangles")?);
    (plan.setting.keys_file, plan.setting.rects_file) = (keys.0, rects.0);
    let data = known.data(&plan.setting)?;
    if let Some(remark) = data.remark() {
        say(format_args!("farlink: {remark}"));
    }
    let loads = args.loads_keys();
    plan.loaded = if loads { data.entries() } else { 0 };
    if plan.access.caches() {
        plan.cache_bytes = args.cache_bytes(plan.loaded).or_else(|| Some(plan.default_cache_bytes(plan.loaded)));
    }
    let prepared = Prepared { known, plan, data, trace, loads, args, _spool: [keys.1, rects.1] };
    let Some(place) = there else {
        let plan = &prepared.plan;
        prepared.data.require_room(plan)?;
        let default = || cluster::default_server_bytes(plan.loaded, plan.servers, prepared.data.servers(plan));
        let bytes = args.server_bytes.unwrap_or_else(default);
        let records = prepared.args.records.unwrap_or_default();
        let own = Cluster::start(plan.servers, bytes, plan.server_threads.unwrap_or(0), records, plan.lock_wait)?;
        let result = prepared.run(&Place::Folder(own.dir().to_owned()));
        let stopped = own.stop();
        return result.and(stopped);
    };
    let result = prepared.run(&place);
    match signals::stopped() {
        Some(signal) => result.with_context(|| format!("stopped by {}", signals::name(signal))),
        None => result,
    }
}

impl Prepared<'_> {
    /// The bench, once there is a cluster.
    fn run(mut self, place: &Place) -> anyhow::Result<()> {
        let cluster = ClusterView::new(place.fabric_once_ready(MemOptions::default(), self.args.wait.wait)?);
        self.data.open_or_create(&cluster, &mut self.plan, self.loads)?;
        self.plan.require_room()?;
        let run = Run { known: self.known, data: &*self.data, plan: &self.plan, place, cluster: &cluster };
        let Some(trace) = &self.trace else {
            let mut reporter = Reporter::new(io::stdout(), self.args.json);
            run.run(cluster::start_compute(self.plan.processes)?, &mut reporter)?;
            return reporter.all_held();
        };
        if self.args.json {
            return self.replay(&run, &**trace, &mut Reporter::new(io::stdout(), true));
        }
        // Standard output is for the answers alone.
        self.replay(&run, &**trace, &mut Reporter::new(io::stderr(), false))
    }

    /// Loads what was asked for, replays the trace, and prints what each operation answers, and what all of them cost.
    fn replay(&self, run: &Run<'_>, trace: &dyn Trace, reporter: &mut Reporter<impl io::Write>) -> anyhow::Result<()> {
        let plan = run.plan;
        if self.loads {
            run.run(cluster::start_compute(plan.processes)?, reporter)?;
        }
        let mut out = io::BufWriter::new(io::stdout());
        let mut hand_out = |answer: crate::subject::Answer| {
            if reporter.is_json() {
                return Ok(reporter.record("answer", answer.fields, &answer.line)?);
            }
            Ok(writeln!(out, "{}", answer.line)?)
        };
        let waiting = plan.is_connected().then(Waiting::begin);
        let replayed = trace.replay(plan, run.place, &mut hand_out);
        drop(waiting);
        // What was answered before an error, too.
        out.flush()?;
        let (seconds, tally) = replayed?;
        ensure!(signals::stopped().is_none(), "all operations were done, and not checked");
        let mut row = Row::measured("trace", seconds, &tally, plan.cache_bytes.is_some());
        // What a trace looks for may be there or not.
        row.missed_per_op = None;
        let replayed_by = Plan { workers: 1, processes: 1, ..plan.clone() };
        let row = bench::varied(row, &replayed_by, 1)?;
        let columns =
            Columns { compares: false, has_cache: plan.cache_bytes.is_some(), returns_many: self.known.returns_many() };
        reporter.row_at_once(&row, &columns.head(), &columns.line(&row))?;
        if !plan.joins_owners {
            reporter.check(&run.final_check(&mut Beside::default())?.0)?;
        }
        reporter.all_held()
    }
}

/// Reads and parses a trace; `-` is standard input. Lines that are blank or start with `#` are skipped.
fn read_trace(known: &dyn Known, path: &Path) -> anyhow::Result<Box<dyn Trace>> {
    let mut content = Vec::new();
    let (name, read) = match path == Path::new("-") {
        true => ("standard input".to_owned(), io::stdin().lock().read_to_end(&mut content)),
        false => (path.display().to_string(), File::open(path).and_then(|mut file| file.read_to_end(&mut content))),
    };
    read.with_context(|| format!("cannot read the trace {name}"))?;
    let parse = || {
        let lines = input::lines(&content).map(|line| line.map(|(number, line)| (number, line.to_owned())));
        known.trace(&lines.collect::<anyhow::Result<Vec<_>>>()?)
    };
    parse().with_context(|| name.clone()).context("nothing was applied")
}
