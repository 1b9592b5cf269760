//! Tables, for a terminal and for Markdown.

use console::{Alignment, Style, measure_text_width, pad_str};

use super::session::{Claims, Session};
use super::summary::{Cell, Ratio, Table, tables};

/// All tables of a session for a terminal; with `colour`, ratios stand out.
pub fn plain(session: &Session, colour: bool) -> String {
    tables(session).iter().map(|t| one_plain(t, claims_of(session, t), colour) + "\n").collect()
}

/// All tables of a session as Markdown, each below a heading of `level`.
pub fn markdown(session: &Session, level: usize, below: impl Fn(&Table) -> String) -> String {
    let one = |t: &Table| {
        let heading = format!("{} {}\n\n", "#".repeat(level), t.model);
        let claims = claims_of(session, t).map_or(String::new(), |c| format!("\n{}.\n", claimed(c)));
        heading + &one_markdown(t) + &claims + &below(t) + "\n"
    };
    tables(session).iter().map(one).collect()
}

fn claims_of(session: &Session, table: &Table) -> Option<Claims> {
    let at = session.settings.targets.iter().position(|t| t.name() == table.model)?;
    session.claims[at].filter(|c| c.nodes > 0)
}

fn claimed(c: Claims) -> String {
    format!("HiNa claims {} of {} nodes", c.claimed, c.nodes)
}

fn heads(t: &Table) -> Vec<String> {
    let others =
        t.programs.iter().skip(1).flat_map(|p| [format!("{p} t/s"), "ratio".into(), "lowest to highest".into()]);
    ["test".to_owned(), format!("{} t/s", t.programs[0])].into_iter().chain(others).collect()
}

/// `(text, ratio)`: the ratio colours the cell.
fn cells(row: &super::summary::Row) -> Vec<(String, Option<f64>)> {
    let speed = |c: &Option<Cell>| (c.as_ref().map_or("-".into(), |c| number(c.speed)), None);
    let mut out = vec![(row.case.to_string(), None), speed(&row.cells[0])];
    for cell in &row.cells[1..] {
        out.push(speed(cell));
        let ratio = cell.as_ref().and_then(|c| c.ratio);
        out.push((ratio.map_or("-".into(), |r| format!("{:.2}x", r.mean)), ratio.map(|r| r.mean)));
        out.push((ratio.map_or("-".into(), spread), None));
    }
    out
}

fn spread(r: Ratio) -> String {
    if r.rounds < 2 { "one round".into() } else { format!("{:.2} to {:.2}", r.low, r.high) }
}

/// Three digits that count, at least.
fn number(speed: f64) -> String {
    if speed >= 100.0 {
        format!("{speed:.0}")
    } else if speed >= 10.0 {
        format!("{speed:.1}")
    } else {
        format!("{speed:.2}")
    }
}

fn one_plain(t: &Table, claims: Option<Claims>, colour: bool) -> String {
    let rows: Vec<_> = t.rows.iter().map(cells).collect();
    let heads = heads(t);
    let width = |i: usize| rows.iter().map(|r| r[i].0.len()).chain([heads[i].len()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let style = |ratio: Option<f64>| match ratio {
        Some(r) if r >= 1.02 => Style::new().green(),
        Some(r) if r < 0.98 => Style::new().red(),
        _ => Style::new(),
    };
    let line = |cells: Vec<String>| {
        let pad = |(i, text): (usize, String)| {
            let side = if i == 0 { Alignment::Left } else { Alignment::Right };
            debug_assert!(measure_text_width(&text) <= widths[i]);
            pad_str(&text, widths[i], side, None).into_owned()
        };
        cells.into_iter().enumerate().map(pad).collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let about = claims.map_or(String::new(), |c| format!(" ({})", claimed(c)));
    let mut out = format!("{}{about}\n{}", t.model, line(heads.clone()));
    for row in rows {
        let paint = |(text, ratio): (String, _)| style(ratio).force_styling(colour).apply_to(text).to_string();
        out += &line(row.into_iter().map(paint).collect());
    }
    out
}

fn one_markdown(t: &Table) -> String {
    let heads = heads(t);
    let rule: Vec<&str> = (0..heads.len()).map(|i| if i == 0 { "---" } else { "---:" }).collect();
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = line(heads.clone()) + &format!("|{}|\n", rule.join("|"));
    for row in &t.rows {
        out += &line(cells(row).into_iter().map(|(text, _)| text).collect());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::session::tests::{run, session};

    fn measured() -> Session {
        let mut s = session(&["pp512", "tg4@d32"], 2);
        for step in s.steps() {
            if step.case.to_string() == "pp512" {
                let speed = [[600.0, 1260.0], [600.0, 1200.0]][step.round as usize][step.program];
                s.runs.push(run(step, &[speed]));
            } else if step.program == 0 && step.round == 0 {
                s.runs.push(run(step, &[8.5]));
            }
        }
        s.claims[0] = Some(Claims { claimed: 18, nodes: 366 });
        s
    }

    #[test]
    fn a_terminal() {
        let want = "tiny (HiNa claims 18 of 366 nodes)\n\
                    test     stock t/s  HiNa t/s  ratio  lowest to highest\n\
                    pp512          600      1230  2.05x       2.00 to 2.10\n\
                    tg4@d32       8.50         -      -                  -\n\n";
        assert_eq!(plain(&measured(), false), want);
        let coloured = plain(&measured(), true);
        assert!(coloured.contains("\u{1b}[32m2.05x"), "{coloured:?}");
        assert_eq!(console::strip_ansi_codes(&coloured), want);
    }

    #[test]
    fn markdown_says_the_same() {
        let text = markdown(&measured(), 3, |_| String::new());
        assert!(
            text.starts_with("### tiny\n\n| test | stock t/s | HiNa t/s | ratio | lowest to highest |\n|---|---:|")
        );
        assert!(text.contains("| pp512 | 600 | 1230 | 2.05x | 2.00 to 2.10 |\n| tg4@d32 | 8.50 | - | - | - |\n"));
        assert!(text.contains("HiNa claims 18 of 366 nodes."));
    }
}
