//! What the command ends with when it cannot do what was asked.

use std::fmt::Display;

/// A result of the command.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Why the command ends early. Either way it has written no file, unless a measurement is slower.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failure {
    /// What was given is at fault: exit code 2.
    Input(String),
    /// A check, the driver or the machine failed: exit code 1.
    Run(String),
    /// A measurement is slower than the one it was compared with: exit code 3.
    Slower(String),
}

impl Failure {
    /// Bad input: `argument` had something, and needs something else.
    pub(crate) fn needs(argument: impl Display, had: impl Display, needs: impl Display) -> Self {
        Self::Input(format!("{argument}: {had}, but it must be {needs}"))
    }

    /// Bad input of another kind.
    pub(crate) fn input(argument: impl Display, problem: impl Display) -> Self {
        Self::Input(format!("{argument}: {problem}"))
    }

    /// The program's exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Run(_) => 1,
            Failure::Input(_) => 2,
            Failure::Slower(_) => 3,
        }
    }

    /// The message, on one line whatever file names and tensor names hold.
    pub(crate) fn line(&self) -> String {
        let (Failure::Input(message) | Failure::Run(message) | Failure::Slower(message)) = self;
        one_line(message)
    }
}

impl From<ferroflash::Error> for Failure {
    fn from(error: ferroflash::Error) -> Self {
        use ferroflash::Error as E;
        let message = error.to_string();
        match error {
            E::OutOfMemory { .. } | E::Driver { .. } => Self::Run(message),
            _ => Self::Input(message),
        }
    }
}

impl From<ferroflash_ledger::Error> for Failure {
    fn from(error: ferroflash_ledger::Error) -> Self {
        Self::Input(error.to_string())
    }
}

/// `text` with control characters written out.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_take_one_line() {
        let failure = Failure::needs("a\nb.npy", "holds \u{1b}[2J", "sane");
        assert_eq!(failure.line(), "a\\nb.npy: holds \\u{1b}[2J, but it must be sane");
        assert_eq!(failure.exit_code(), 2);
    }

    #[test]
    fn the_driver_is_not_the_users_fault() {
        let driver = ferroflash::Error::OutOfMemory { device: "cpu".to_owned(), bytes: 1 };
        assert_eq!(Failure::from(driver).exit_code(), 1);
        let argument = ferroflash::Error::NoDevice { ordinal: 3, count: 1 };
        assert_eq!(Failure::from(argument).exit_code(), 2);
    }
}
