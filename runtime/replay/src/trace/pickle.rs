//! Reader of Python's pickles as plain data: numbers, text, lists and dicts. It never executes their code.
//!
//! Snapshots share most of their content (a call site's frames are part of every event of that site), so values refer to containers by
//! index and are never copied. Instances of classes become [`Value::Other`]. Source: the comments of CPython's Lib/pickletools.py,
//! protocols 0 to 5.

use rustc_hash::FxHashMap;

/// Value of a pickle; containers and text by their index in the [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Number(i64),
    Text(Span),
    /// List or tuple, by index.
    List(u32),
    Dict(u32),
    /// Any other kind of value.
    Other,
}

/// Position of a text in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    at: u32,
    len: u32,
}

/// Reason why a file is not a readable pickle.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleFault {
    /// The file ends in the middle.
    #[error("it ends in the middle: it is truncated")]
    Truncated,
    /// An instruction is unknown.
    #[error("instruction {opcode:#04x} at byte {at} is not known")]
    Unknown {
        /// Code of the instruction.
        opcode: u8,
        /// Offset in the file.
        at: u32,
    },
    /// An instruction does not fit the preceding ones.
    #[error(
        "the pickle is malformed: the instruction that ends at byte {at} does not fit the preceding ones"
    )]
    Misplaced {
        /// Offset of the next instruction.
        at: u32,
    },
    /// The file is larger than supported.
    #[error("it is larger than 4 GiB")]
    TooLarge,
}

/// Pickle after reading.
pub(super) struct Pickle<'a> {
    bytes: &'a [u8],
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    root: Value,
}

impl<'a> Pickle<'a> {
    /// Reads a whole pickle.
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, PickleFault> {
        if u32::try_from(bytes.len()).is_err() {
            return Err(PickleFault::TooLarge);
        }
        let pickle = Pickle { bytes, lists: Vec::new(), dicts: Vec::new(), root: Value::None };
        let mut reader =
            Reader { pickle, at: 0, stack: Vec::new(), marks: Vec::new(), memo: FxHashMap::default() };
        while let Some(root) = reader.step()? {
            if let Step::Stop(root) = root {
                reader.pickle.root = root;
                return Ok(reader.pickle);
            }
        }
        Err(PickleFault::Truncated)
    }

    pub(super) const fn root(&self) -> Value {
        self.root
    }

    pub(super) fn text(&self, value: Value) -> Option<&'a [u8]> {
        let Value::Text(Span { at, len }) = value else { return None };
        self.bytes.get(at as usize..)?.get(..len as usize)
    }

    /// Returns the items of a list or tuple.
    pub(super) fn list(&self, value: Value) -> Option<&[Value]> {
        let Value::List(place) = value else { return None };
        self.lists.get(place as usize).map(Vec::as_slice)
    }

    /// Returns the value of a key in a dict; [`Value::None`] if the key is missing, `None` if `dict` is not a dict.
    pub(super) fn field(&self, dict: Value, key: &str) -> Option<Value> {
        let Value::Dict(place) = dict else { return None };
        let pairs = self.dicts.get(place as usize)?;
        let found = pairs.iter().rev().find(|(name, _)| self.text(*name) == Some(key.as_bytes()));
        Some(found.map_or(Value::None, |&(_, value)| value))
    }
}

enum Step {
    On,
    Stop(Value),
}

struct Reader<'a> {
    pickle: Pickle<'a>,
    at: usize,
    stack: Vec<Value>,
    /// Depth of the stack at each open mark.
    marks: Vec<usize>,
    memo: FxHashMap<u32, Value>,
}

impl<'a> Reader<'a> {
    /// Executes one instruction; `None` at the end of the file.
    fn step(&mut self) -> Result<Option<Step>, PickleFault> {
        let Some(&opcode) = self.pickle.bytes.get(self.at) else { return Ok(None) };
        self.at += 1;
        match opcode {
            b'.' => return self.pop().map(|root| Some(Step::Stop(root))),
            0x80 => _ = self.take(1)?, // PROTO
            0x95 => _ = self.take(8)?, // FRAME
            b'(' => self.marks.push(self.stack.len()),
            b'0' => _ = self.stack.pop(),
            b'1' => _ = self.above_mark()?,
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'N' => self.stack.push(Value::None),
            0x88 => self.stack.push(Value::Number(1)),
            0x89 => self.stack.push(Value::Number(0)),
            b'K' => self.number(1)?,
            b'M' => self.number(2)?,
            b'J' => self.signed(4)?,
            0x8a => self.long(1)?,
            0x8b => self.long(4)?,
            b'I' | b'L' => self.decimal()?,
            b'F' => self.line().map(|_| self.stack.push(Value::Other))?,
            b'G' => self.take(8).map(|_| self.stack.push(Value::Other))?,
            0x8c | b'U' => self.text(1)?,
            b'X' | b'T' => self.text(4)?,
            0x8d => self.text(8)?,
            b'V' => {
                let span = self.line()?;
                self.stack.push(Value::Text(span));
            }
            b'C' => self.bytes(1)?,
            b'B' => self.bytes(4)?,
            0x8e | 0x96 => self.bytes(8)?,
            b'S' => self.line().map(|_| self.stack.push(Value::Other))?,
            b']' | b')' => self.push_list(Vec::new()),
            b'l' | b't' => {
                let items = self.above_mark()?;
                self.push_list(items);
            }
            0x85..=0x87 => {
                let items = self.last(usize::from(opcode - 0x84))?;
                self.push_list(items);
            }
            b'a' => {
                let items = self.last(1)?;
                self.extend(&items)?;
            }
            b'e' => {
                let items = self.above_mark()?;
                self.extend(&items)?;
            }
            b'}' => self.push_dict(&[]),
            b'd' => {
                let items = self.above_mark()?;
                self.push_dict(&items);
            }
            b's' => {
                let items = self.last(2)?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.above_mark()?;
                self.set(&items)?;
            }
            b'p' => {
                let id = self.line_number()?;
                self.put(id)?;
            }
            b'q' => {
                let id = self.unsigned(1)?;
                self.put(id)?;
            }
            b'r' => {
                let id = self.unsigned(4)?;
                self.put(id)?;
            }
            0x94 => self.put(self.memo.len() as u64)?,
            b'g' => {
                let id = self.line_number()?;
                self.get(id)?;
            }
            b'h' => {
                let id = self.unsigned(1)?;
                self.get(id)?;
            }
            b'j' => {
                let id = self.unsigned(4)?;
                self.get(id)?;
            }
            _ => self.object(opcode)?,
        }
        Ok(Some(Step::On))
    }

    /// Reads sets and objects: their parts leave the stack, and [`Value::Other`] takes their place.
    fn object(&mut self, opcode: u8) -> Result<(), PickleFault> {
        match opcode {
            0x8f => {}                                  // EMPTY_SET
            0x90 => return self.above_mark().map(drop), // ADDITEMS
            0x91 => _ = self.above_mark()?,             // FROZENSET
            b'c' => _ = (self.line()?, self.line()?),   // GLOBAL: module, name
            0x93 | b'R' | 0x81 => _ = self.last(2)?,    // STACK_GLOBAL, REDUCE, NEWOBJ
            0x92 => _ = self.last(3)?,                  // NEWOBJ_EX
            b'b' => return self.last(1).map(drop),      // BUILD
            _ => return Err(PickleFault::Unknown { opcode, at: place(self.at - 1) }),
        }
        self.stack.push(Value::Other);
        Ok(())
    }

    fn misplaced(&self) -> PickleFault {
        PickleFault::Misplaced { at: place(self.at) }
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], PickleFault> {
        let len = usize::try_from(len).map_err(|_| PickleFault::Truncated)?;
        let rest = self.pickle.bytes.get(self.at..).unwrap_or_default();
        let taken = rest.get(..len).ok_or(PickleFault::Truncated)?;
        self.at += len;
        Ok(taken)
    }

    /// Returns the rest of the line, without its end.
    fn line(&mut self) -> Result<Span, PickleFault> {
        let rest = self.pickle.bytes.get(self.at..).unwrap_or_default();
        let len = rest.iter().position(|&byte| byte == b'\n').ok_or(PickleFault::Truncated)?;
        let span = Span { at: place(self.at), len: place(len) };
        self.at += len + 1;
        Ok(span)
    }

    fn unsigned(&mut self, len: u64) -> Result<u64, PickleFault> {
        Ok(self.take(len)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn number(&mut self, len: u64) -> Result<(), PickleFault> {
        let number = self.unsigned(len)?;
        self.stack.push(i64::try_from(number).map_or(Value::Other, Value::Number));
        Ok(())
    }

    /// Reads a number in two's complement; those of more than 8 bytes become [`Value::Other`].
    fn signed(&mut self, len: u64) -> Result<(), PickleFault> {
        let bytes = self.take(len)?;
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let number = bytes
            .iter()
            .rev()
            .fold(if negative { -1 } else { 0 }, |number: i64, &byte| number << 8 | i64::from(byte));
        // A ninth byte of zero comes from an unsigned number, which is also too large.
        self.stack.push(if bytes.len() > 8 { Value::Other } else { Value::Number(number) });
        Ok(())
    }

    fn long(&mut self, prefix: u64) -> Result<(), PickleFault> {
        let len = self.unsigned(prefix)?;
        self.signed(len)
    }

    /// Reads a number as text; `00` and `01` are the truth values, and an `L` may follow.
    fn decimal(&mut self) -> Result<(), PickleFault> {
        let span = self.line()?;
        let text = self.pickle.text(Value::Text(span)).and_then(|text| str::from_utf8(text).ok());
        let number = text.and_then(|text| text.trim_end_matches('L').parse().ok());
        self.stack.push(number.map_or(Value::Other, Value::Number));
        Ok(())
    }

    fn line_number(&mut self) -> Result<u64, PickleFault> {
        self.decimal()?;
        match self.pop()? {
            Value::Number(number) => u64::try_from(number).map_err(|_| self.misplaced()),
            _ => Err(self.misplaced()),
        }
    }

    fn text(&mut self, prefix: u64) -> Result<(), PickleFault> {
        let len = self.unsigned(prefix)?;
        let at = place(self.at);
        let text = self.take(len)?;
        self.stack.push(Value::Text(Span { at, len: place(text.len()) }));
        Ok(())
    }

    fn bytes(&mut self, prefix: u64) -> Result<(), PickleFault> {
        let len = self.unsigned(prefix)?;
        self.take(len)?;
        self.stack.push(Value::Other);
        Ok(())
    }

    fn top(&self) -> Result<Value, PickleFault> {
        self.stack.last().copied().ok_or_else(|| self.misplaced())
    }

    fn pop(&mut self) -> Result<Value, PickleFault> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn last(&mut self, count: usize) -> Result<Vec<Value>, PickleFault> {
        let from = self.stack.len().checked_sub(count).ok_or_else(|| self.misplaced())?;
        Ok(self.stack.split_off(from))
    }

    fn above_mark(&mut self) -> Result<Vec<Value>, PickleFault> {
        match self.marks.pop() {
            Some(mark) if mark <= self.stack.len() => Ok(self.stack.split_off(mark)),
            _ => Err(self.misplaced()),
        }
    }

    fn push_list(&mut self, items: Vec<Value>) {
        self.stack.push(Value::List(place(self.pickle.lists.len())));
        self.pickle.lists.push(items);
    }

    fn push_dict(&mut self, items: &[Value]) {
        self.stack.push(Value::Dict(place(self.pickle.dicts.len())));
        self.pickle.dicts.push(pairs(items).collect());
    }

    /// Appends to the list on the stack.
    fn extend(&mut self, items: &[Value]) -> Result<(), PickleFault> {
        let Value::List(list) = self.top()? else { return Err(self.misplaced()) };
        if let Some(list) = self.pickle.lists.get_mut(list as usize) {
            list.extend_from_slice(items);
        }
        Ok(())
    }

    /// Adds to the dict on the stack; ignored for an object.
    fn set(&mut self, items: &[Value]) -> Result<(), PickleFault> {
        match self.top()? {
            Value::Dict(dict) => {
                if let Some(dict) = self.pickle.dicts.get_mut(dict as usize) {
                    dict.extend(pairs(items));
                }
                Ok(())
            }
            Value::Other => Ok(()),
            _ => Err(self.misplaced()),
        }
    }

    fn put(&mut self, id: u64) -> Result<(), PickleFault> {
        let id = u32::try_from(id).map_err(|_| self.misplaced())?;
        let top = self.top()?;
        self.memo.insert(id, top);
        Ok(())
    }

    fn get(&mut self, id: u64) -> Result<(), PickleFault> {
        let known = u32::try_from(id).ok().and_then(|id| self.memo.get(&id).copied());
        self.stack.push(known.ok_or_else(|| self.misplaced())?);
        Ok(())
    }
}

fn pairs(items: &[Value]) -> impl Iterator<Item = (Value, Value)> + '_ {
    items.as_chunks().0.iter().map(|&[key, value]| (key, value))
}

/// Converts a position in the file or an index to 32 bits: the file is smaller than 2^32 bytes.
#[allow(clippy::cast_possible_truncation)]
const fn place(at: usize) -> u32 {
    at as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_parts_are_read_once() {
        // pickle.dumps({"a": x, "b": [x, x]}, 4) with x = [{"n": 300}]
        let bytes =
            b"\x80\x04\x95\x22\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94}\x94\x8c\x01n\x94M,\x01sa\
            \x8c\x01b\x94]\x94(h\x02h\x02eu.";
        let pickle = Pickle::read(bytes).unwrap();
        let a = pickle.field(pickle.root(), "a").unwrap();
        let b = pickle.field(pickle.root(), "b").unwrap();
        assert_eq!(pickle.list(b), Some([a, a].as_slice()));
        let dict = pickle.list(a).unwrap()[0];
        assert_eq!(pickle.field(dict, "n"), Some(Value::Number(300)));
        assert_eq!(pickle.field(dict, "m"), Some(Value::None));
        assert_eq!(pickle.field(a, "m"), None);
    }

    #[test]
    fn numbers_of_every_kind() {
        for (bytes, number) in [
            (b"\x80\x02J\xff\xff\xff\xff.".as_slice(), -1),
            (b"\x80\x02K\xff.", 255),
            (b"\x80\x02\x8a\x06\x00\x00\x00\x40\x3a\x7f.", 0x7f3a_4000_0000),
            (b"\x80\x02\x8a\x01\x80.", -128),
            (b"\x80\x02\x8a\x00.", 0),
            (b"I-7\n.", -7),
            (b"L12L\n.", 12),
        ] {
            assert_eq!(Pickle::read(bytes).unwrap().root(), Value::Number(number), "{bytes:?}");
        }
        let beyond = b"\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.";
        assert_eq!(Pickle::read(beyond).unwrap().root(), Value::Other);
    }

    #[test]
    fn objects_are_read_over() {
        // pickle.dumps([fractions.Fraction(1, 2), {3}, 1.5], 2)
        let bytes =
            b"\x80\x02]q\x00(cfractions\nFraction\nq\x01K\x01K\x02\x86q\x02Rq\x03c__builtin__\nset\nq\x04]\
            q\x05K\x03a\x85q\x06Rq\x07G?\xf8\x00\x00\x00\x00\x00\x00e.";
        let pickle = Pickle::read(bytes).unwrap();
        assert_eq!(pickle.list(pickle.root()), Some([Value::Other; 3].as_slice()));
    }

    #[test]
    fn malformed_pickles_are_refused() {
        let fault = |bytes: &[u8]| Pickle::read(bytes).map(|_| ()).unwrap_err();
        assert_eq!(fault(b"\x80\x04"), PickleFault::Truncated);
        assert_eq!(fault(b"\x80\x04\x8c\x09abc"), PickleFault::Truncated);
        assert_eq!(fault(b"\x80\x04\xfe"), PickleFault::Unknown { opcode: 0xfe, at: 2 });
        for bytes in [b".".as_slice(), b"e.", b"K\x01K\x02a.", b"h\x07.", b"K\x01\x86.", b"(1u."] {
            assert!(matches!(fault(bytes), PickleFault::Misplaced { .. }), "{bytes:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_are_read_or_refused(bytes in proptest::collection::vec(0_u8.., 0..200)) {
            let _ = Pickle::read(&bytes);
        }

        #[test]
        fn a_bent_snapshot_is_read_or_refused(at in 0_usize..2900, byte: u8) {
            let mut bytes = include_bytes!("../../tests/snapshot.pickle").to_vec();
            bytes[at] = byte;
            let _ = super::super::snapshot::read(&bytes, None);
        }
    }
}
