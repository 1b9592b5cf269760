//! From runs to rows: tokens per second, the ratio to stock, and how far the rounds are apart.

use super::case::Case;
use super::session::Session;

/// A program's place in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Tokens per second: the median over the rounds of each round's median.
    pub speed: f64,
    /// Ratio to stock; none for stock itself, or where stock was not measured.
    pub ratio: Option<Ratio>,
}

/// A ratio of tokens per second, taken round by round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Geometric mean over the rounds.
    pub mean: f64,
    /// The lowest round.
    pub low: f64,
    /// The highest round.
    pub high: f64,
    /// Rounds.
    pub rounds: usize,
}

/// One test of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The test.
    pub case: Case,
    /// By program; none where it has not run, or cannot.
    pub cells: Vec<Option<Cell>>,
}

/// One model.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The model's name.
    pub model: String,
    /// Names of the programs; the first is stock.
    pub programs: Vec<String>,
    /// The tests of which anything was measured.
    pub rows: Vec<Row>,
}

/// A table for each model of which anything was measured.
pub fn tables(session: &Session) -> Vec<Table> {
    let programs: Vec<String> = session.settings.programs.iter().map(|p| p.name.clone()).collect();
    let of = |(target, t): (usize, &super::session::Target)| {
        let row = |&case: &Case| row(session, target, case, programs.len());
        let rows: Vec<Row> = t.cases.iter().filter_map(row).collect();
        (!rows.is_empty()).then(|| Table { model: t.name(), programs: programs.clone(), rows })
    };
    session.settings.targets.iter().enumerate().filter_map(of).collect()
}

fn row(session: &Session, target: usize, case: Case, programs: usize) -> Option<Row> {
    // By program: (round, tokens per second).
    let by_round = |program: usize| -> Vec<(u32, f64)> {
        let ours = session.runs.iter().filter(|r| (r.target, r.case, r.program) == (target, case, program));
        ours.filter_map(|r| Some((r.round, median(&r.tokens_per_second)?))).collect()
    };
    let stock = by_round(0);
    let cell = |program: usize| {
        let rounds = by_round(program);
        let speed = median(&rounds.iter().map(|r| r.1).collect::<Vec<_>>())?;
        let stock_of = |round| stock.iter().find(|s| s.0 == round).map(|s| s.1);
        let ratios: Vec<f64> = rounds.iter().filter_map(|r| Some(r.1 / stock_of(r.0)?)).collect();
        Some(Cell { speed, ratio: if program == 0 { None } else { ratio(&ratios) } })
    };
    let cells: Vec<Option<Cell>> = (0..programs).map(cell).collect();
    cells.iter().any(Option::is_some).then_some(Row { case, cells })
}

fn ratio(rounds: &[f64]) -> Option<Ratio> {
    let fold = |f: fn(f64, f64) -> f64| rounds.iter().copied().reduce(f);
    let mean = (rounds.iter().map(|r| r.ln()).sum::<f64>() / rounds.len() as f64).exp();
    Some(Ratio { mean, low: fold(f64::min)?, high: fold(f64::max)?, rounds: rounds.len() })
}

/// The middle value, or the mean of the two in the middle.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.get((sorted.len().checked_sub(1)?) / 2..=sorted.len() / 2)?;
    Some(middle.iter().sum::<f64>() / middle.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::session::tests::{run, session};

    #[test]
    fn ratios_are_taken_within_a_round() {
        let mut s = session(&["pp8", "tg4"], 2);
        // Round 1 ran on a machine half as fast: the ratio does not see it.
        let speeds = [[100.0, 210.0], [50.0, 95.0]];
        for step in s.steps().into_iter().filter(|s| s.case.to_string() == "pp8") {
            let speed = speeds[step.round as usize][step.program];
            s.runs.push(run(step, &[speed * 0.5, speed, speed * 3.0]));
        }
        let tables = tables(&s);
        assert_eq!((tables.len(), tables[0].rows.len(), tables[0].model.as_str()), (1, 1, "tiny"));
        let hina = tables[0].rows[0].cells[1].clone().unwrap();
        let ratio = hina.ratio.unwrap();
        assert_eq!((ratio.low, ratio.high, ratio.rounds), (1.9, 2.1, 2));
        assert!((ratio.mean - (1.9f64 * 2.1).sqrt()).abs() < 1e-12);
        assert_eq!(hina.speed, 152.5);
        assert_eq!(tables[0].rows[0].cells[0].clone().unwrap().ratio, None);
    }

    #[test]
    fn half_a_round_gives_a_speed_and_no_ratio() {
        let mut s = session(&["pp8"], 2);
        let steps = s.steps();
        s.runs.push(run(steps[1], &[7.0]));
        let row = tables(&s).remove(0).rows.remove(0);
        assert_eq!(row.cells, [None, Some(Cell { speed: 7.0, ratio: None })]);
        assert!(tables(&session(&["pp8"], 1)).is_empty());
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
    }
}
