//! Where a comparison stands: a bar with the time left on a terminal, a line for each run elsewhere.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::drive::time_left;
use super::session::{Session, Step};

/// On standard error, so that standard output is the table alone.
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// `total` runs of which `done` are done.
    pub fn new(total: usize, done: usize) -> Self {
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}").expect("a template that is known");
        let bar = ProgressBar::new(total as u64).with_position(done as u64).with_style(style.progress_chars("=> "));
        // Hidden on what is no terminal, or one that cannot move its cursor.
        if bar.is_hidden() {
            return Self { bar: None };
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar: Some(bar) }
    }

    /// A line that is no result.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => eprintln!("{text}"),
        }
    }

    /// A line that stays.
    pub fn warn(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("warning: {text}")),
            None => eprintln!("warning: {text}"),
        }
    }

    /// A run begins.
    pub fn begin(&self, session: &Session, step: Step) {
        let settings = &session.settings;
        let left = time_left(session, &session.open()).map_or(String::new(), |t| format!(", {}", about(t)));
        let text = format!(
            "{} {}: {}, round {} of {}{left}",
            settings.targets[step.target].name(),
            step.case,
            settings.programs[step.program].name,
            step.round + 1,
            settings.rounds,
        );
        if let Some(bar) = &self.bar {
            bar.set_message(text);
        }
    }

    /// The last run of the session has ended.
    pub fn end(&self, session: &Session) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
            return;
        }
        let Some(run) = session.runs.last() else { return };
        let settings = &session.settings;
        let speed: Vec<String> = run.tokens_per_second.iter().map(|t| format!("{t:.2}")).collect();
        let open = session.open();
        let left = time_left(session, &open).filter(|_| !open.is_empty()).map_or("done".into(), about);
        eprintln!(
            "{}/{} {} {} {}: {} t/s ({})",
            session.runs.len(),
            session.steps().len(),
            settings.targets[run.target].name(),
            run.case,
            settings.programs[run.program].name,
            if speed.is_empty() { "no".into() } else { speed.join(", ") },
            left,
        );
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// `about 3 min left`.
fn about(left: Duration) -> String {
    match left.as_secs() {
        s if s < 90 => format!("about {} s left", s.max(1)),
        s => format!("about {} min left", s.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_for_the_time_left() {
        let of = |s| about(Duration::from_secs(s));
        assert_eq!(
            [of(0), of(89), of(90), of(3600)],
            ["about 1 s left", "about 89 s left", "about 2 min left", "about 60 min left"]
        );
    }
}
