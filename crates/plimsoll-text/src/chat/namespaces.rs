//! `namespace(...)`, and taking all of them apart after a rendering.
//!
//! A namespace is the one value that a template can change, so only namespaces can form a ring or a long chain of
//! values. A ring is never freed. Freeing a long chain recursively overflows the stack. Every namespace of a rendering
//! is therefore remembered. In the end each is emptied, attribute by attribute, while all of them are still alive.

use std::cell::RefCell;
use std::collections::BTreeMap;

use minijinja::machinery::{Instruction, Instructions, eval, make_string_output};
use minijinja::value::{Value, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error};

use super::budget::{charge, charge_deep};

/// What a namespace costs, in bytes of work: about its size.
const COST: usize = 1 << 10;

thread_local! {
    static ALIVE: RefCell<Vec<Value>> = const { RefCell::new(Vec::new()) };
}

/// Registers the function.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_function("namespace", |defaults: Option<ValueOrKwargs>| {
        charge(COST)?;
        let namespace = minijinja::functions::namespace(defaults)?;
        ALIVE.with_borrow_mut(|alive| alive.push(namespace.clone()));
        charge_deep(&namespace)?;
        Ok::<_, Error>(namespace)
    });
}

/// Empties the namespaces that this thread has made since the last call.
pub(super) fn take_apart() {
    let alive = ALIVE.take();
    let mut attributes: Vec<(Value, String)> = Vec::new();
    for namespace in &alive {
        let names = namespace.try_iter().into_iter().flatten();
        attributes.extend(names.filter_map(|name| Some((namespace.clone(), name.as_str()?.to_owned()))));
    }
    if attributes.is_empty() {
        return;
    }
    // Only a program can assign to a namespace.
    let environment = Environment::empty();
    let mut program = Instructions::new("take apart", "");
    for (namespace, name) in &attributes {
        program.add(Instruction::LoadConst(Value::from(())));
        program.add(Instruction::LoadConst(namespace.clone()));
        program.add(Instruction::SetAttr(name));
    }
    program.add(Instruction::LoadConst(Value::from(())));
    let (mut nothing, no_blocks) = (String::new(), BTreeMap::new());
    let mut output = make_string_output(&mut nothing);
    let context = Value::from(());
    // Loading constants and assigning to namespaces does not fail; if it did, the values would merely live on.
    let _ = eval(&environment, &program, context, &no_blocks, &mut output, AutoEscape::None);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// A value that can tell whether it is still held.
    #[derive(Debug)]
    struct Witness;
    impl minijinja::value::Object for Witness {}

    #[test]
    fn rings_are_freed() {
        let witness = Arc::new(Witness);
        let mut environment = Environment::new();
        install(&mut environment);
        let _budget = super::super::budget::Budget::start(1 << 20);
        let source = "{% set a = namespace() %}{% set b = namespace(other=a, w=w) %}{% set a.other = b %}";
        let context = Value::from_pairs([("w", Value::from_dyn_object(witness.clone()))]);
        environment.render_str(source, context).unwrap();
        assert!(Arc::strong_count(&witness) > 1, "the ring holds it");
        take_apart();
        assert_eq!(Arc::strong_count(&witness), 1);
    }
}
