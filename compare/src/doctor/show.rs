//! The page.

use console::Style;

use super::Report;
use super::advice::{Level, ModelFacts};
use super::facts::Facts;
use crate::machine::bytes;

/// The report as text; with `colour`, findings stand out.
pub fn page(report: &Report, colour: bool) -> String {
    let mut lines = machine(&report.machine, report.threads);
    if let Some(m) = &report.model {
        lines.push(String::new());
        lines.extend(model(m));
    }
    lines.push(String::new());
    if report.findings.is_empty() {
        lines.push("nothing found that costs speed".into());
    }
    for finding in &report.findings {
        let (word, style) = match finding.level {
            Level::Note => ("note", Style::new()),
            Level::Slow => ("slow", Style::new().yellow()),
            Level::Stop => ("stop", Style::new().red()),
        };
        lines.push(format!("{}  {}", style.force_styling(colour).apply_to(word), finding.what));
        lines.extend(finding.fix.iter().map(|fix| format!("      {fix}")));
    }
    lines.extend([String::new(), "to run:".into(), format!("  {}", report.command)]);
    lines.join("\n") + "\n"
}

fn field(name: &str, value: impl AsRef<str>) -> String {
    format!("{name:<14}{}", value.as_ref())
}

fn machine(f: &Facts, threads: usize) -> Vec<String> {
    let m = &f.machine;
    let yes = |(name, there): &(&str, bool)| format!("{name} {}", if *there { "yes" } else { "no" });
    let quota = f.quota.map_or(String::new(), |q| format!(", {q:.1} CPUs' time by the control group"));
    let mut lines = vec![
        field("CPU", format!("{}{}", m.cpu, if m.virtual_machine { " (virtual machine)" } else { "" })),
        field("has", f.features.iter().map(yes).collect::<Vec<_>>().join(", ")),
        field("HiNa runs on", &m.engine),
        field("CPUs", format!("{} on {} cores{quota}; run with -t {threads}", m.cpus, f.cores)),
        field("memory", format!("{}, {} can be had", bytes(m.memory), bytes(f.memory_available))),
    ];
    for node in &f.nodes {
        let text = format!("{}: {} CPUs, {} ({} free)", node.id, node.cpus, bytes(node.memory), bytes(node.free));
        lines.push(field("NUMA node", text));
    }
    lines.push(field("huge pages", f.huge_pages.as_deref().unwrap_or("unknown")));
    lines.push(field("governor", f.governor.as_deref().unwrap_or("none to be seen")));
    lines.push(field("kernel", &m.kernel));
    lines
}

fn model(m: &ModelFacts) -> Vec<String> {
    let experts = m.experts.map_or("no experts".into(), |(n, used)| format!("{n} experts, {used} a token"));
    let mut lines = vec![
        field("model", &m.file),
        field("", format!("{}, {}, {experts}", m.architecture, bytes(m.bytes))),
        field("page cache", format!("{} of {}{}", bytes(m.pages.cached), bytes(m.pages.bytes), nodes(m))),
        String::new(),
        format!("{:<15} {:<8} {:>7} {:>10}  {}", "tensors", "type", "number", "size", "by HiNa"),
    ];
    for g in &m.groups {
        let verdict = g.left.as_ref().map_or("yes".into(), |why| format!("no: {why}"));
        lines.push(format!("{:<15} {:<8} {:>7} {:>10}  {verdict}", g.part, g.kind, g.tensors, bytes(g.bytes)));
    }
    lines
}

fn nodes(m: &ModelFacts) -> String {
    if let Some(why) = &m.pages.unknown {
        return format!(" (on which nodes is not known: {why})");
    }
    let share = |(id, share): &(u16, f64)| format!("node {id}: {:.0} %", share * 100.0);
    match m.pages.by_node.as_slice() {
        [] => String::new(),
        some => format!(" ({})", some.iter().map(share).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::advice::Finding;

    #[test]
    fn findings_with_and_without_colour() {
        let report = Report {
            machine: Facts::default(),
            model: Some(ModelFacts { file: "m.gguf".into(), experts: Some((128, 8)), ..ModelFacts::default() }),
            threads: 4,
            findings: vec![Finding::new(Level::Slow, "the disk is slow", "buy another")],
            command: "llama-server".into(),
        };
        let plain = page(&report, false);
        assert!(plain.contains("slow  the disk is slow\n      buy another\n\nto run:\n  llama-server\n"), "{plain}");
        assert!(plain.contains("128 experts, 8 a token"));
        let coloured = page(&report, true);
        assert_ne!(coloured, plain);
        assert_eq!(console::strip_ansi_codes(&coloured), plain);
    }
}
