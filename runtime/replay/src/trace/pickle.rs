//! Reader of Python's pickles as plain data: numbers, text, lists and dicts. It never executes their code.
//!
//! Snapshots share most of their content (a call site's frames are part of every event of that site), so values refer to containers by
//! index and are never copied. Instances of classes become [`Value::Other`]. Source: the comments of CPython's Lib/pickletools.py,
//! protocols 0 to 5.
//!
//! The pickle is read as a stream, and only the parts that a snapshot's reader queries are kept: of a dict the values of the [`KEYS`], of a
//! text its first bytes, of a number its lowest 64 bits. No instruction takes memory that is not charged to the file's [`Budget`].

use std::io::{self, BufRead};

use rustc_hash::FxHashMap;

use super::Stop;
use super::bounds::{Budget, OverBudget};

/// Keys whose values are kept.
const KEYS: [&str; 12] = [
    "action",
    "addr",
    "address",
    "blocks",
    "device",
    "device_traces",
    "requested_size",
    "segments",
    "size",
    "state",
    "stream",
    "time_us",
];

/// Number of bytes that are kept of a text.
const KEPT: usize = 40;

/// Memory of an entry of the memo, with the free entries of a table that has just grown.
const PER_MEMO: usize = 64;

/// Value of a pickle; containers and text by their index in the [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Number(i64),
    Text(u32),
    /// List or tuple, by index.
    List(u32),
    Dict(u32),
    /// Any other kind of value.
    Other,
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
        /// Offset in the unpacked file.
        at: u64,
    },
    /// An instruction does not fit the preceding ones.
    #[error(
        "the pickle is malformed: the instruction that ends at byte {at} does not fit the preceding ones"
    )]
    Misplaced {
        /// Offset of the next instruction in the unpacked file.
        at: u64,
    },
    /// The values up to this instruction need too much memory.
    #[error("at byte {at} {over}")]
    OverBudget {
        /// Offset of the next instruction in the unpacked file.
        at: u64,
        /// Bound of the memory.
        over: OverBudget,
    },
}

/// Pickle after reading.
pub(super) struct Pickle {
    /// Beginnings of the texts.
    texts: Vec<Text>,
    lists: Vec<Vec<Value>>,
    /// Values of the dicts by key, as an index in [`KEYS`].
    dicts: Vec<Vec<(u8, Value)>>,
    root: Value,
}

/// Text, of which only the beginning is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Text {
    len: u8,
    bytes: [u8; KEPT],
}

impl Pickle {
    /// Reads a whole pickle. What it leaves of the budget is for the events.
    pub(super) fn read(from: &mut dyn BufRead, budget: &mut Budget) -> Result<Self, Stop<PickleFault>> {
        let pickle = Pickle { texts: Vec::new(), lists: Vec::new(), dicts: Vec::new(), root: Value::None };
        let (stack, marks, memo) = (Vec::new(), Vec::new(), FxHashMap::default());
        let mut reader = Reader { from, budget, pickle, at: 0, stack, marks, memo };
        loop {
            if let Some(root) = reader.step()? {
                reader.pickle.root = root;
                return Ok(reader.pickle);
            }
        }
    }

    pub(super) const fn root(&self) -> Value {
        self.root
    }

    /// Returns the beginning of a text, at most 40 bytes.
    pub(super) fn text(&self, value: Value) -> Option<&[u8]> {
        let Value::Text(place) = value else { return None };
        let text = self.texts.get(place as usize)?;
        text.bytes.get(..usize::from(text.len))
    }

    /// Returns the items of a list or tuple.
    pub(super) fn list(&self, value: Value) -> Option<&[Value]> {
        let Value::List(place) = value else { return None };
        self.lists.get(place as usize).map(Vec::as_slice)
    }

    /// Returns the number of dicts.
    pub(super) fn dicts(&self) -> usize {
        self.dicts.len()
    }

    /// Returns the value of one of the [`KEYS`] in a dict; [`Value::None`] if the key is missing, `None` if `dict` is not a dict.
    pub(super) fn field(&self, dict: Value, key: &str) -> Option<Value> {
        let Value::Dict(place) = dict else { return None };
        let pairs = self.dicts.get(place as usize)?;
        let found = pairs.iter().find(|(place, _)| KEYS.get(usize::from(*place)) == Some(&key));
        Some(found.map_or(Value::None, |&(_, value)| value))
    }
}

type Result<T, E = Stop<PickleFault>> = std::result::Result<T, E>;

struct Reader<'a> {
    from: &'a mut dyn BufRead,
    budget: &'a mut Budget,
    pickle: Pickle,
    at: u64,
    stack: Vec<Value>,
    /// Depth of the stack at each open mark.
    marks: Vec<usize>,
    memo: FxHashMap<u32, Value>,
}

impl Reader<'_> {
    /// Executes one instruction; returns the root at the end of the pickle.
    fn step(&mut self) -> Result<Option<Value>> {
        let opcode = self.byte()?;
        match opcode {
            b'.' => return self.pop().map(Some),
            0x80 => self.skip(1)?, // PROTO
            0x95 => self.skip(8)?, // FRAME
            b'(' => {
                let depth = self.stack.len();
                let pushed = self.budget.push(&mut self.marks, depth);
                self.charged(pushed)?;
            }
            b'0' => _ = self.stack.pop(),
            b'1' => drop(self.above_mark()?),
            b'2' => {
                let top = self.top()?;
                self.push(top)?;
            }
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Number(1))?,
            0x89 => self.push(Value::Number(0))?,
            b'K' => self.number(1)?,
            b'M' => self.number(2)?,
            b'J' => self.signed(4)?,
            0x8a => self.long(1)?,
            0x8b => self.long(4)?,
            b'I' | b'L' => {
                let number = self.decimal()?;
                self.push(number.map_or(Value::Other, Value::Number))?;
            }
            b'F' | b'S' => {
                self.line()?;
                self.push(Value::Other)?;
            }
            b'G' => {
                self.skip(8)?;
                self.push(Value::Other)?;
            }
            0x8c | b'U' => self.text(1)?,
            b'X' | b'T' => self.text(4)?,
            0x8d => self.text(8)?,
            b'V' => {
                let text = self.line()?;
                self.push_text(text)?;
            }
            b'C' => self.bytes(1)?,
            b'B' => self.bytes(4)?,
            0x8e | 0x96 => self.bytes(8)?,
            b']' | b')' => self.push_list(Vec::new())?,
            b'l' | b't' => {
                let items = self.above_mark()?;
                self.push_list(items)?;
            }
            0x85..=0x87 => {
                let items = self.last(usize::from(opcode - 0x84))?;
                self.push_list(items)?;
            }
            b'a' => {
                let items = self.last(1)?;
                self.extend(&items)?;
            }
            b'e' => {
                let items = self.above_mark()?;
                self.extend(&items)?;
            }
            b'}' => self.push_dict(&[])?,
            b'd' => {
                let items = self.above_mark()?;
                self.push_dict(&items)?;
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
        Ok(None)
    }

    /// Reads sets and objects: their parts leave the stack, and [`Value::Other`] takes their place.
    fn object(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            0x8f => {}                                  // EMPTY_SET
            0x90 => return self.above_mark().map(drop), // ADDITEMS
            0x91 => drop(self.above_mark()?),           // FROZENSET
            b'c' => _ = (self.line()?, self.line()?),   // GLOBAL: module, name
            0x93 | b'R' | 0x81 => _ = self.last(2)?,    // STACK_GLOBAL, REDUCE, NEWOBJ
            0x92 => _ = self.last(3)?,                  // NEWOBJ_EX
            b'b' => return self.last(1).map(drop),      // BUILD
            _ => return Err(Stop::Fault(PickleFault::Unknown { opcode, at: self.at - 1 })),
        }
        self.push(Value::Other)
    }

    fn misplaced(&self) -> Stop<PickleFault> {
        Stop::Fault(PickleFault::Misplaced { at: self.at })
    }

    /// Names the place where the budget was exceeded.
    fn charged(&self, charge: Result<(), OverBudget>) -> Result<()> {
        charge.map_err(|over| Stop::Fault(PickleFault::OverBudget { at: self.at, over }))
    }

    /// Returns the unread bytes of the buffer, at least one.
    fn buffer(&mut self) -> Result<&[u8]> {
        loop {
            match self.from.fill_buf() {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Stop::Read(error)),
            }
        }
        match self.from.fill_buf()? {
            [] => Err(Stop::Fault(PickleFault::Truncated)),
            buffer => Ok(buffer),
        }
    }

    fn consume(&mut self, len: usize) {
        self.from.consume(len);
        self.at += len as u64;
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = self.buffer()?.first().copied().unwrap_or_default();
        self.consume(1);
        Ok(byte)
    }

    /// Reads `len` bytes, and returns the first of them.
    fn take(&mut self, len: u64) -> Result<Text> {
        let (mut text, mut left) = (Text { len: 0, bytes: [0; KEPT] }, len);
        while left > 0 {
            let buffer = self.buffer()?;
            let part = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
            text.append(buffer.get(..part).unwrap_or_default());
            self.consume(part);
            left -= part as u64;
        }
        Ok(text)
    }

    fn skip(&mut self, len: u64) -> Result<()> {
        self.take(len).map(drop)
    }

    /// Reads the rest of the line, and returns its beginning without its end.
    fn line(&mut self) -> Result<Text> {
        let mut text = Text { len: 0, bytes: [0; KEPT] };
        loop {
            let buffer = self.buffer()?;
            let end = buffer.iter().position(|&byte| byte == b'\n');
            let part = end.unwrap_or(buffer.len());
            text.append(buffer.get(..part).unwrap_or_default());
            self.consume(part + usize::from(end.is_some()));
            if end.is_some() {
                return Ok(text);
            }
        }
    }

    /// Reads a number of at most 8 bytes.
    fn unsigned(&mut self, len: u64) -> Result<u64> {
        let text = self.take(len)?;
        Ok(text.kept().iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn number(&mut self, len: u64) -> Result<()> {
        let number = self.unsigned(len)?;
        self.push(i64::try_from(number).map_or(Value::Other, Value::Number))
    }

    /// Reads a number in two's complement; those of more than 8 bytes become [`Value::Other`].
    fn signed(&mut self, len: u64) -> Result<()> {
        let text = self.take(len)?;
        let bytes = text.kept();
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let number = bytes
            .iter()
            .rev()
            .fold(if negative { -1 } else { 0 }, |number: i64, &byte| number << 8 | i64::from(byte));
        // A ninth byte of zero comes from an unsigned number, which is also too large.
        self.push(if len > 8 { Value::Other } else { Value::Number(number) })
    }

    fn long(&mut self, prefix: u64) -> Result<()> {
        let len = self.unsigned(prefix)?;
        self.signed(len)
    }

    /// Reads a number as text; `00` and `01` are the truth values, and an `L` may follow.
    fn decimal(&mut self) -> Result<Option<i64>> {
        let line = self.line()?;
        let text = str::from_utf8(line.kept()).ok();
        Ok(text.and_then(|text| text.trim_end_matches('L').parse().ok()))
    }

    fn line_number(&mut self) -> Result<u64> {
        let number = self.decimal()?.and_then(|number| u64::try_from(number).ok());
        number.ok_or_else(|| self.misplaced())
    }

    fn text(&mut self, prefix: u64) -> Result<()> {
        let len = self.unsigned(prefix)?;
        let text = self.take(len)?;
        self.push_text(text)
    }

    fn bytes(&mut self, prefix: u64) -> Result<()> {
        let len = self.unsigned(prefix)?;
        self.skip(len)?;
        self.push(Value::Other)
    }

    fn push(&mut self, value: Value) -> Result<()> {
        let pushed = self.budget.push(&mut self.stack, value);
        self.charged(pushed)
    }

    fn top(&self) -> Result<Value> {
        self.stack.last().copied().ok_or_else(|| self.misplaced())
    }

    fn pop(&mut self) -> Result<Value> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn last(&mut self, count: usize) -> Result<Vec<Value>> {
        let from = self.stack.len().checked_sub(count).ok_or_else(|| self.misplaced())?;
        Ok(self.stack.split_off(from))
    }

    fn above_mark(&mut self) -> Result<Vec<Value>> {
        match self.marks.pop() {
            Some(mark) if mark <= self.stack.len() => Ok(self.stack.split_off(mark)),
            _ => Err(self.misplaced()),
        }
    }

    fn push_text(&mut self, text: Text) -> Result<()> {
        let place = self.place(self.pickle.texts.len())?;
        let pushed = self.budget.push(&mut self.pickle.texts, text);
        self.charged(pushed)?;
        self.push(Value::Text(place))
    }

    fn push_list(&mut self, items: Vec<Value>) -> Result<()> {
        let place = self.place(self.pickle.lists.len())?;
        let memory = items.capacity() * size_of::<Value>();
        let pushed = self.budget.push(&mut self.pickle.lists, items);
        self.charged(pushed)?;
        let charge = self.budget.charge(memory);
        self.charged(charge)?;
        self.push(Value::List(place))
    }

    fn push_dict(&mut self, items: &[Value]) -> Result<()> {
        let place = self.place(self.pickle.dicts.len())?;
        let pushed = self.budget.push(&mut self.pickle.dicts, Vec::new());
        self.charged(pushed)?;
        self.push(Value::Dict(place))?;
        self.set(items)
    }

    /// Appends to the list on the stack.
    fn extend(&mut self, items: &[Value]) -> Result<()> {
        let Value::List(list) = self.top()? else { return Err(self.misplaced()) };
        if let Some(list) = self.pickle.lists.get_mut(list as usize) {
            let reserved = self.budget.reserve(list, items.len());
            list.extend(items.iter().copied().filter(|_| reserved.is_ok()));
            self.charged(reserved)?;
        }
        Ok(())
    }

    /// Adds to the dict on the stack; ignored for an object.
    fn set(&mut self, items: &[Value]) -> Result<()> {
        let dict = match self.top()? {
            Value::Dict(dict) => dict as usize,
            Value::Other => return Ok(()),
            _ => return Err(self.misplaced()),
        };
        for &[key, value] in items.as_chunks().0 {
            let Some(key) = self.pickle.text(key).and_then(key_of) else { continue };
            let Some(dict) = self.pickle.dicts.get_mut(dict) else { continue };
            match dict.iter_mut().find(|(known, _)| *known == key) {
                Some((_, known)) => *known = value,
                None => {
                    let pushed = self.budget.push(dict, (key, value));
                    self.charged(pushed)?;
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, id: u64) -> Result<()> {
        let id = u32::try_from(id).map_err(|_| self.misplaced())?;
        let top = self.top()?;
        if self.memo.insert(id, top).is_none() {
            let charge = self.budget.charge(PER_MEMO);
            self.charged(charge)?;
        }
        Ok(())
    }

    fn get(&mut self, id: u64) -> Result<()> {
        let known = u32::try_from(id).ok().and_then(|id| self.memo.get(&id).copied());
        let known = known.ok_or_else(|| self.misplaced())?;
        self.push(known)
    }

    /// Converts an index to 32 bits. The budget of a file below 2^37 bytes ends before that.
    fn place(&self, at: usize) -> Result<u32> {
        u32::try_from(at).map_err(|_| self.misplaced())
    }
}

impl Text {
    fn append(&mut self, bytes: &[u8]) {
        let kept = usize::from(self.len);
        for (to, from) in self.bytes.iter_mut().skip(kept).zip(bytes) {
            *to = *from;
            self.len += 1;
        }
    }

    fn kept(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// Returns the index of a text in [`KEYS`].
fn key_of(text: &[u8]) -> Option<u8> {
    (0..).zip(KEYS).find_map(|(place, key)| (key.as_bytes() == text).then_some(place))
}

#[cfg(test)]
mod tests {
    use glake_units::Bytes;

    use super::*;

    fn read(mut bytes: &[u8]) -> Result<Pickle, PickleFault> {
        Pickle::read(&mut bytes, &mut Budget::new(Bytes::mib(64))).map_err(|stop| match stop {
            Stop::Fault(fault) => fault,
            Stop::Read(error) => panic!("{error}"),
        })
    }

    #[test]
    fn shared_parts_are_read_once() {
        // pickle.dumps({"size": x, "state": [x, x]}, 4) with x = [{"addr": 300}]; the value of an unknown key is not kept
        let bytes =
            b"\x80\x04\x95\x2c\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x04size\x94]\x94}\x94\x8c\x04addr\x94M,\x01sa\
            \x8c\x05state\x94]\x94(h\x02h\x02e\x8c\x03any\x94K\x01u.";
        let pickle = read(bytes).unwrap();
        let a = pickle.field(pickle.root(), "size").unwrap();
        let b = pickle.field(pickle.root(), "state").unwrap();
        assert_eq!(pickle.list(b), Some([a, a].as_slice()));
        let dict = pickle.list(a).unwrap()[0];
        assert_eq!(pickle.field(dict, "addr"), Some(Value::Number(300)));
        assert_eq!(pickle.field(dict, "stream"), Some(Value::None));
        assert_eq!(pickle.field(a, "addr"), None);
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
            assert_eq!(read(bytes).unwrap().root(), Value::Number(number), "{bytes:?}");
        }
        let beyond = b"\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.";
        assert_eq!(read(beyond).unwrap().root(), Value::Other);
    }

    #[test]
    fn objects_are_read_over() {
        // pickle.dumps([fractions.Fraction(1, 2), {3}, 1.5], 2)
        let bytes =
            b"\x80\x02]q\x00(cfractions\nFraction\nq\x01K\x01K\x02\x86q\x02Rq\x03c__builtin__\nset\nq\x04]\
            q\x05K\x03a\x85q\x06Rq\x07G?\xf8\x00\x00\x00\x00\x00\x00e.";
        let pickle = read(bytes).unwrap();
        assert_eq!(pickle.list(pickle.root()), Some([Value::Other; 3].as_slice()));
    }

    #[test]
    fn malformed_pickles_are_refused() {
        let fault = |bytes: &[u8]| read(bytes).map(|_| ()).unwrap_err();
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
            let _ = read(&bytes);
        }

        #[test]
        fn a_bent_snapshot_is_read_or_refused(at in 0_usize..2900, byte: u8) {
            let mut bytes = include_bytes!("../../tests/snapshot.pickle").to_vec();
            bytes[at] = byte;
            let _ = super::super::Trace::from_bytes(std::path::Path::new("s"), &bytes, None);
        }
    }
}
