//! Compiling a template into the library's instructions.
//!
//! The library cannot replace an operator, but its instructions are accessible. Where Python's operator differs, a call of a function in
//! `operators` replaces the instruction. Literal text becomes a printed constant, so that `output` counts it.

use std::sync::LazyLock;

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use regex::Regex;

use super::operators::name;
use crate::error::TextError;

/// The settings that chat templates are written for.
fn syntax() -> Result<SyntaxConfig, TextError> {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| TextError::BadTemplate(error.to_string()))
}

/// Rewrites tags that only training tools support: `{% generation %}` marks the assistant's text and prints nothing.
pub(super) fn prepare(source: &str) -> String {
    static MARK: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());
    let Some(mark) = MARK.as_ref() else {
        return source.to_owned();
    };
    let rewritten = mark.replace_all(source, |found: &regex::Captures<'_>| {
        let statement = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {statement} {}%}}", &found[1], &found[3])
    });
    rewritten.into_owned()
}

/// Compiles a prepared source. Templates that consist of several files or blocks are refused.
pub(super) fn compile(source: &str) -> Result<Instructions<'_>, TextError> {
    let bad = |error: minijinja::Error| TextError::BadTemplate(error.to_string());
    let syntax = syntax()?;
    let tree = parse(source, "chat template", syntax).map_err(bad)?;
    let mut generator = CodeGenerator::new("chat template", source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    if let Some(block) = blocks.keys().next() {
        return Err(TextError::BadTemplate(format!("blocks are not supported: remove {block:?}")));
    }
    with_python_operators(&instructions)
}

/// Returns the program with Python's operators.
fn with_python_operators<'s>(plain: &Instructions<'s>) -> Result<Instructions<'s>, TextError> {
    let mut out = Instructions::new(plain.name(), plain.source());
    let mut moved = Vec::new();
    let mut index = 0;
    while let Some(instruction) = plain.get(index) {
        let line = plain.get_line(index).and_then(|line| u16::try_from(line).ok());
        let mut add = |instruction| match line {
            Some(line) => out.add_with_line(instruction, line),
            None => out.add(instruction),
        };
        match instruction {
            Instruction::EmitRaw(text) => {
                moved.push(add(Instruction::LoadConst(Value::from(*text))));
                add(Instruction::Emit);
            }
            other => moved.push(add(replacement(other)?)),
        }
        index += 1;
    }
    moved.push(out.add(Instruction::LoadConst(Value::from(()))));
    for index in 0..moved[moved.len() - 1] {
        if let Some(target) = out.get_mut(index).and_then(jump_target) {
            *target = *moved
                .get(*target as usize)
                .ok_or_else(|| TextError::BadTemplate(format!("a jump to {target} leaves the program")))?;
        }
    }
    Ok(out)
}

/// Returns the instruction, or the call that replaces it.
fn replacement<'s>(instruction: &Instruction<'s>) -> Result<Instruction<'s>, TextError> {
    use minijinja::machinery::Instruction as I;
    Ok(match instruction {
        I::Add => I::CallFunction(name::ADD, Some(2)),
        I::StringConcat => I::CallFunction(name::CONCAT, Some(2)),
        I::Mul => I::CallFunction(name::MULTIPLY, Some(2)),
        I::In => I::CallFunction(name::IN, Some(2)),
        I::Slice => I::CallFunction(name::SLICE, Some(4)),
        I::FastSuper | I::CallBlock(_) | I::LoadBlocks | I::Include(_) | I::ExportLocals => {
            let message = "blocks, extends, include and import are not supported: put the template into one file";
            return Err(TextError::BadTemplate(message.to_owned()));
        }
        other => other.clone(),
    })
}

/// The target of an instruction that may jump.
fn jump_target<'i>(instruction: &'i mut Instruction<'_>) -> Option<&'i mut u32> {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}
