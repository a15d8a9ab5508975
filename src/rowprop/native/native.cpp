// A sliced gradient as a TensorImpl, and recipes: what the Python rules did at an op, replayed without Python.
//
// RowImpl claims the full shape and holds the kept rows; its Python object is a RowGrad. For every op that has a rule, a
// boxed kernel stands at the highest dispatch key of such a tensor. It looks for the recipe of the call. Without one the
// call goes on to RowGrad.__torch_dispatch__, as if this file did not exist. So hooks, custom functions and whatever
// cannot be recorded run in Python, and Python's rules alone say what an op does.
//
// A recipe may be used for a call whose key is equal. The key holds the op, all arguments that are no tensors, and of
// each tensor its dtype, device, sizes and strides, whether it is the same as an earlier one, and, if it is sliced, the
// layout and the traits of its rows. recorder.py bars what depends on more.
//
// The number of kept rows is not in the key. A recipe serves all numbers between the lowest and the highest that it was
// recorded at: what it does was equal at both, but for numbers that are a multiple of the kept rows. A rule can do
// something else in between only where the kept rows are as many as something else: such a call has it in its key.
#include <torch/csrc/utils/pybind.h>
#include <ATen/ATen.h>

#include <ATen/ScalarOps.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Ints = std::vector<int64_t>;
using Key = c10::SmallVector<int64_t, 96>;
using Layout = std::shared_ptr<const Ints>;  // the numbers of a Python Layout

// --- what Python gives once ----------------------------------------------------------------------------------------

PyTypeObject* row_grad = nullptr;
PyObject *reports = nullptr, *note = nullptr, *unpacks = nullptr, *derived = nullptr;
std::atomic<bool> enabled{false};

// --- rows and gradients --------------------------------------------------------------------------------------------

int64_t stream_of(const c10::Device& device) {
  if (device.is_cpu() || device.is_meta()) return 0;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// What C++ needs of a RowSet, which holds it. The last two gathers are remembered until the backward ends: the result of
// a layer is the input of the next.
struct Rows {
  Tensor index;
  int64_t kept = 0;
  Ints traits;  // equal for rows for which every rule does the same with equal shapes
  std::shared_ptr<std::atomic<bool>> marked;  // shared by all rows of one origin; see RowSet.copying
  std::atomic<bool> hooked{false};            // whether a hook looks at these rows
  std::mutex lock;
  struct Gathered {
    Tensor source, result;
    int64_t version = 0, stream = 0;
    Layout layout;
  };
  Gathered recent[2];
  int next = 0;
  bool ends = false;  // whether the running backward empties `recent` when it ends

  void forget() {
    Gathered old[2];
    std::lock_guard<std::mutex> held(lock);
    std::swap(old, recent);
    ends = false;
  }
};

// Empties the memory of gathers when autograd is done with the backward, or has given it up.
struct End {
  explicit End(std::shared_ptr<Rows> r) : rows(std::move(r)) {}
  ~End() { rows->forget(); }
  std::shared_ptr<Rows> rows;
};

// -1: a tensor that has no count of writes, or no memory of its own, is not remembered.
int64_t version_of(const Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (impl->is_inference() || t.is_meta() || typeid(*impl) != typeid(c10::TensorImpl)) return -1;
  return impl->version_counter().current_version();
}

bool same_memory(const Tensor& a, const Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
      a.storage_offset() == b.storage_offset() && a.dtype() == b.dtype() && a.sizes() == b.sizes() &&
      a.strides() == b.strides() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

Tensor remembered(Rows& rows, const Tensor& source, const Layout& layout) {
  const int64_t version = version_of(source);
  Tensor result;
  if (version >= 0) {
    std::lock_guard<std::mutex> held(rows.lock);
    for (auto& r : rows.recent) {
      if (r.source.defined() && r.version == version && same_memory(r.source, source) && *r.layout == *layout &&
          r.stream == stream_of(source.device())) {
        result = r.result;
      }
    }
  }
  if (result.defined()) {  // an unpack hook may have filled the same memory anew
    py::gil_scoped_acquire gil;
    if (py::reinterpret_borrow<py::object>(unpacks)().cast<bool>()) return Tensor();
  }
  return result;
}

void remember(const std::shared_ptr<Rows>& rows, const Tensor& source, const Layout& layout, const Tensor& result) {
  const int64_t version = version_of(source);
  if (version < 0) return;
  Rows::Gathered old;
  bool first = false;
  {
    std::lock_guard<std::mutex> held(rows->lock);
    first = !rows->ends && torch::autograd::get_current_graph_task_id() >= 0;
    rows->ends |= first;
    old = std::move(rows->recent[rows->next]);
    rows->recent[rows->next] = {source, result, version, stream_of(source.device()), layout};
    rows->next ^= 1;
  }
  if (first) {
    auto end = std::make_shared<End>(rows);
    torch::autograd::Engine::get_default_engine().queue_callback([end] { end->rows->forget(); });
  }
}

// A RowSet, for as long as gradients of it live.
struct __attribute__((visibility("hidden"))) Held {
  Held(py::object set, std::shared_ptr<Rows> r) : rowset(std::move(set)), rows(std::move(r)) {}
  ~Held() {
    if (!Py_IsInitialized()) {
      rowset.release();
      return;
    }
    py::gil_scoped_acquire gil;
    rowset = py::object();
  }
  py::object rowset;
  std::shared_ptr<Rows> rows;
};

struct Viewed {  // how a view was made
  Tensor base;
  const OperatorHandle op;
  std::vector<IValue> rest;
};

struct RowImpl final : c10::TensorImpl {
  using c10::TensorImpl::TensorImpl;
  Tensor values;
  std::shared_ptr<Held> held;
  Layout layout;
  std::shared_ptr<Viewed> viewed;
  int64_t place = -1;  // in the list of results of the view op, if it returns one
  int64_t stream = 0;  // that the values were made on
  bool live = true;    // false: Python holds the content now
};

RowImpl* row(const Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  return typeid(*impl) == typeid(RowImpl) ? static_cast<RowImpl*>(impl) : nullptr;
}

const DispatchKeySet lazy({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor});

// The gradient, with its Python object: a hook must not meet one without.
Tensor wrap(Tensor values, std::shared_ptr<Held> held, Layout layout, at::IntArrayRef sizes) {
  const auto keys = values.key_set() - lazy;
  int64_t count = 1;
  c10::SmallVector<int64_t, 5> strides(sizes.size());
  for (size_t i = sizes.size(); i-- > 0; count *= std::max<int64_t>(sizes[i], 1)) strides[i] = count;
  const size_t bytes = count * values.itemsize();
  const auto device = values.device();
  c10::Storage memory(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, device), c10::GetAllocator(c10::kMeta), true);
  auto impl = c10::make_intrusive<RowImpl>(std::move(memory), keys, values.dtype());
  impl->set_sizes_and_strides(sizes, strides);
  impl->set_python_dispatch(true);
  impl->stream = stream_of(device);
  impl->values = std::move(values);
  impl->held = std::move(held);
  impl->layout = std::move(layout);
  return Tensor(std::move(impl));
}

void name_in_python(const Tensor& t) {
  py::gil_scoped_acquire gil;
  Py_DECREF(THPVariable_Wrap(t, row_grad));
}

// --- recipes -------------------------------------------------------------------------------------------------------

struct Arg {
  enum Kind { constant, one, list, kept } kind = constant;
  IValue value;
  Ints at;  // registers; -1 is an undefined tensor. Of `kept`: of each number the factor of the kept rows, 0 for none
};

// One step: an op; or a gather of the register `source`, made by the steps `inner`; or something derived from the rows.
struct Step {
  std::optional<OperatorHandle> op;
  std::vector<Arg> args;
  Ints outs;  // registers of the results, -1 for none
  std::vector<Step> inner;
  int64_t source = -1;
  Layout layout;
  std::shared_ptr<py::object> which;  // of what is derived
};

struct Out {
  int64_t at;     // register; -1 is an undefined tensor
  Layout layout;  // null: a plain tensor
  Ints sizes;
};

struct Recipe {
  bool views = false, list = false;
  bool apart = false;  // each number of kept rows has a recipe of its own
  int64_t low = 0, high = 0;  // numbers of kept rows that it was recorded at
  std::shared_ptr<py::object> recording;  // what it was made of, for a recording at another number; null: Python runs it
  std::string name, why;  // of the op; why Python runs it
  int64_t registers = 0;
  std::vector<bool> tensors;  // for each argument, whether it is a tensor or a list of them
  std::vector<Step> steps;
  std::vector<Out> outs;
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (auto v : key) {
      h = (h ^ static_cast<uint64_t>(v)) * 0xff51afd7ed558ccdull;
      h ^= h >> 32;
    }
    return h;
  }
};

using Table = std::unordered_map<Key, std::shared_ptr<Recipe>, Hash>;
constexpr size_t LIMIT = 8192;  // recipes; the table is emptied when it is full
Table recipes;  // null: a call was seen once
std::mutex guard;  // never held while the GIL is waited for
struct Pending {
  Key key;
  int64_t kept;
};
thread_local std::optional<Pending> pending;  // the call that Python is to record
thread_local std::string why;                 // the reason why Python runs the call
constexpr const char* SEEN = "the first calls of a shape are recorded";
std::atomic<int64_t> hits{0}, misses{0};

enum Tag : int64_t { none, integer, boolean, real, integers, booleans, reals, device, text, tensors, undefined, sliced, plain, again };

int64_t bits(double d) {
  int64_t v;
  std::memcpy(&v, &d, sizeof v);
  return v;
}

void add_ints(Key& key, at::IntArrayRef v) {
  key.push_back(static_cast<int64_t>(v.size()));
  key.append(v.begin(), v.end());
}

// Whether the values' sizes follow from those of the gradient: then the key does without them.
bool kept_sizes(const RowImpl& r, at::IntArrayRef sizes) {
  const Ints& l = *r.layout;
  const int64_t dim = l[0], kept = r.held->rows->kept;
  c10::SmallVector<int64_t, 5> expected(sizes.begin(), sizes.end());
  int64_t major = l[1];
  for (size_t i = 4; i < l.size(); i += 4) {
    expected[l[i]] /= l[i + 1];
    major /= l[i + 1];
  }
  expected[dim] = expected[dim] / major * kept;
  return r.values.sizes() == at::IntArrayRef(expected);
}

struct Call {
  Key key;
  RowImpl* first = nullptr;
  bool own = false;  // whether the number of kept rows is part of the key
  c10::SmallVector<int64_t, 32> sizes;  // that a rule may compare
  c10::SmallVector<int64_t, 4> rows;    // with these: the number of kept rows, and the sizes of dimensions with rows
  c10::SmallVector<c10::TensorImpl*, 8> met;  // the tensors so far, a gradient's values in its place

  bool add(const Tensor& t) {
    if (!t.defined()) {
      key.push_back(Tag::undefined);
      return true;
    }
    auto* r = row(t);
    const Tensor& held = r ? r->values : t;
    if (r) {
      if (!r->live) return no("the gradient was handed to Python");
      if (first && first->held->rows != r->held->rows) return no("gradients of different rows meet");
      if (r->stream != stream_of(t.device())) return no("the gradient was made on another stream");
      if (!first) {
        first = r;
        add_ints(key, r->held->rows->traits);
        key.push_back(r->held->rows->hooked);
      }
      key.push_back(Tag::sliced);
      add_ints(key, *r->layout);
      add_ints(key, t.sizes());
      sizes.append(r->layout->begin(), r->layout->end());
    }
    auto* impl = held.unsafeGetTensorImpl();
    if (typeid(*impl) != typeid(c10::TensorImpl) || impl->key_set().has_any(lazy) || impl->key_set().has(DispatchKey::Python) ||
        held.layout() != at::kStrided) {
      return no("an operand is a tensor of another kind");
    }
    sizes.append(t.sizes().begin(), t.sizes().end());
    for (size_t i = 0; i < met.size(); i++) {
      if (met[i] == impl) {
        key.push_back(Tag::again);
        key.push_back(static_cast<int64_t>(i));
      }
    }
    met.push_back(impl);
    key.push_back(Tag::plain);
    key.push_back(static_cast<int64_t>(held.scalar_type()));
    key.push_back(static_cast<int64_t>(held.device().type()) * 256 + held.device().index());
    if (r && kept_sizes(*r, t.sizes())) {
      // Strides of dimensions outside of the rows are usually multiples of the number of kept rows: a minus marks these.
      const int64_t kept = r->held->rows->kept, dim = r->layout->front(), within = held.stride(dim);
      for (auto s : held.strides()) key.push_back(s > within && s % kept == 0 ? -(s / kept) : s);
      rows.push_back(held.size(dim));
    } else {
      own |= r != nullptr;
      add_ints(key, held.sizes());
      add_ints(key, held.strides());
    }
    key.push_back(held.storage_offset() % 8);  // kernels ask whether an address is aligned
    if (impl->is_wrapped_number()) {
      if (held.is_complex()) return no("a number is complex");
      key.push_back(held.is_floating_point() ? bits(held.item<double>()) : held.item<int64_t>());
    } else {
      key.push_back(Tag::none);
    }
    return true;
  }

  bool add(const IValue& v) {
    if (v.isTensor()) return add(v.toTensor());
    if (v.isNone()) return put(Tag::none, 0);
    if (v.isInt()) {
      sizes.push_back(v.toInt());
      return put(Tag::integer, v.toInt());
    }
    if (v.isBool()) return put(Tag::boolean, v.toBool());
    if (v.isDouble()) return put(Tag::real, bits(v.toDouble()));
    if (v.isDevice()) return put(Tag::device, static_cast<int64_t>(v.toDevice().type()) * 256 + v.toDevice().index());
    if (v.isString()) {
      auto& s = v.toStringRef();
      put(Tag::text, static_cast<int64_t>(s.size()));
      for (char c : s) key.push_back(c);
      return true;
    }
    if (v.isIntList()) {
      const auto l = v.toIntVector();
      key.push_back(Tag::integers);
      add_ints(key, l);
      sizes.append(l.begin(), l.end());
      return true;
    }
    if (v.isBoolList()) {
      auto l = v.toBoolList();
      put(Tag::booleans, static_cast<int64_t>(l.size()));
      for (bool b : l) key.push_back(b);
      return true;
    }
    if (v.isDoubleList()) {
      auto l = v.toDoubleVector();
      put(Tag::reals, static_cast<int64_t>(l.size()));
      for (double d : l) key.push_back(bits(d));
      return true;
    }
    if (v.isList()) {
      auto l = v.toListRef();
      put(Tag::tensors, static_cast<int64_t>(l.size()));
      for (auto& each : l) {
        if (!(each.isTensor() || each.isNone())) return no("a list holds more than tensors");
        if (!add(each)) return false;
      }
      return true;
    }
    return no("an argument is of another kind");
  }

  bool no(const char* reason) {
    why = reason;
    return false;
  }

  bool put(int64_t tag, int64_t value) {
    key.push_back(tag);
    key.push_back(value);
    return true;
  }

  int64_t kept() const { return first->held->rows->kept; }

  // Once all arguments are added.
  void end() {
    rows.push_back(kept());
    for (auto n : rows) own |= std::find(sizes.begin(), sizes.end(), n) != sizes.end();
    key.push_back(own ? kept() : 0);
  }
};

// The recipe of a call; null: Python runs it. Python is to record it where `pending` is set.
std::shared_ptr<Recipe> find(Call& call) {
  Table old;
  std::lock_guard<std::mutex> held(guard);
  auto found = recipes.find(call.key);
  if (found != recipes.end() && found->second && found->second->apart) {
    call.key.back() = call.kept();
    found = recipes.find(call.key);
  }
  if (found == recipes.end()) {
    why = SEEN;
    if (recipes.size() >= LIMIT) std::swap(old, recipes);
    recipes.emplace(std::move(call.key), nullptr);
    return nullptr;
  }
  auto recipe = found->second;
  if (recipe && recipe->low <= call.kept() && call.kept() <= recipe->high) {
    if (recipe->recording) return recipe;
    why = recipe->why;
    return nullptr;
  }
  why = SEEN;
  pending = {std::move(call.key), call.kept()};
  return nullptr;
}

// --- replay --------------------------------------------------------------------------------------------------------

Tensor number(const c10::Scalar& value) {  // as a tensor, where an op takes one
  Tensor t = at::scalar_to_tensor(value);
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

struct Run {
  const std::shared_ptr<Held>& held;
  std::vector<Tensor> regs;

  Tensor at(int64_t i) const { return i < 0 ? Tensor() : regs[i]; }

  void call(const Step& s) {
    thread_local std::vector<Stack> pool;
    Stack stack;
    if (!pool.empty()) {
      stack = std::move(pool.back());
      pool.pop_back();
    }
    for (auto& a : s.args) {
      if (a.kind == Arg::constant) {
        stack.push_back(a.value);
      } else if (a.kind == Arg::kept && a.value.isInt()) {
        stack.emplace_back(a.at[0] * held->rows->kept);
      } else if (a.kind == Arg::kept && a.value.isNone()) {
        stack.emplace_back(number(a.at[0] * held->rows->kept));
      } else if (a.kind == Arg::kept) {
        auto l = a.value.toIntVector();
        for (size_t i = 0; i < l.size(); i++) l[i] = a.at[i] ? a.at[i] * held->rows->kept : l[i];
        stack.emplace_back(std::move(l));
      } else if (a.kind == Arg::one) {
        stack.emplace_back(at(a.at[0]));
      } else {
        c10::List<std::optional<Tensor>> some;  // `index` takes a list in which tensors may be left out
        c10::List<Tensor> all;
        for (auto i : a.at) {
          if (a.value.isNone()) all.push_back(at(i));
          else some.push_back(i < 0 ? std::optional<Tensor>() : std::optional<Tensor>(regs[i]));
        }
        if (a.value.isNone()) stack.emplace_back(std::move(all));
        else stack.emplace_back(std::move(some));
      }
    }
    s.op->callBoxed(stack);
    if (stack.size() == 1 && stack[0].isTensorList()) {
      auto l = stack[0].toTensorVector();
      for (size_t i = 0; i < s.outs.size(); i++) regs[s.outs[i]] = l[i];
    } else {
      for (size_t i = 0; i < s.outs.size(); i++) {
        if (s.outs[i] >= 0) regs[s.outs[i]] = std::move(stack[i]).toTensor();
      }
    }
    stack.clear();
    pool.push_back(std::move(stack));
  }

  void run(const std::vector<Step>& steps) {
    for (auto& s : steps) {
      if (s.op) {
        call(s);
      } else if (s.which) {
        py::gil_scoped_acquire gil;
        regs[s.outs[0]] = py::reinterpret_borrow<py::object>(derived)(held->rowset, *s.which).cast<Tensor>();
      } else {
        Tensor found = remembered(*held->rows, regs[s.source], s.layout);
        if (!found.defined()) {
          run(s.inner);
          found = at(s.outs[0]);
          remember(held->rows, regs[s.source], s.layout, found);
        }
        regs[s.outs[0]] = std::move(found);
      }
    }
  }
};

void replay(const Recipe& r, const OperatorHandle& op, size_t n, Stack* stack, const std::shared_ptr<Held>& held) {
  at::AutoDispatchBelowADInplaceOrView below;
  thread_local std::vector<std::vector<Tensor>> pool;
  Run run{held, {}};
  if (!pool.empty()) {
    run.regs = std::move(pool.back());
    pool.pop_back();
  }
  run.regs.resize(r.registers);
  run.regs[0] = held->rows->index;
  auto args = torch::jit::last(*stack, n);
  size_t at = 1;  // the registers of tensor arguments, in order
  auto take = [&](const IValue& v) {
    if (v.isTensor() && v.toTensor().defined()) {
      auto* w = row(v.toTensor());
      run.regs[at] = w ? w->values : v.toTensor();
    }
    at++;
  };
  for (size_t i = 0; i < n; i++) {
    if (!r.tensors[i]) continue;
    if (args[i].isList()) {
      for (auto& v : args[i].toListRef()) take(v);
    } else {
      take(args[i]);
    }
  }
  run.run(r.steps);
  std::shared_ptr<Viewed> viewed;
  if (r.views) viewed = std::make_shared<Viewed>(Viewed{args[0].toTensor(), op, std::vector<IValue>(args.begin() + 1, args.end())});
  torch::jit::drop(*stack, n);
  c10::List<Tensor> list;
  for (size_t i = 0; i < r.outs.size(); i++) {
    auto& o = r.outs[i];
    Tensor out = run.at(o.at);
    if (o.layout) {
      out = wrap(std::move(out), held, o.layout, o.sizes);
      row(out)->viewed = viewed;
      if (r.list) row(out)->place = static_cast<int64_t>(i);
      name_in_python(out);
    }
    if (r.list) list.push_back(std::move(out));
    else stack->emplace_back(std::move(out));
  }
  if (r.list) stack->emplace_back(std::move(list));
  run.regs.clear();
  pool.push_back(std::move(run.regs));
}

bool bare() {  // whether nothing beside autograd's backward takes part in this call
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return !at::GradMode::is_enabled() && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !tls.included_.has_any(c10::autocast_dispatch_keyset) && !tls.included_.has(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !tls.included_.has(DispatchKey::Functionalize) && !tls.excluded_.has(DispatchKey::Python);
}

bool ends_at_a_leaf() {  // as backward.py has it
  const auto node = torch::autograd::get_current_node();
  if (!node || node->num_outputs() == 0 || !node->next_edge(0).function) return true;
  return dynamic_cast<torch::autograd::AccumulateGrad*>(node->next_edge(0).function.get()) != nullptr;
}

// The recipe that this call is replayed by; null: Python runs it.
std::shared_ptr<Recipe> recipe_of(Call& call, const OperatorHandle& op, at::ArrayRef<IValue> args) {
  pending.reset();
  if (!bare()) return call.no("a dispatch mode, autocast or a forward takes part"), nullptr;
  call.key.push_back(reinterpret_cast<int64_t>(&op.schema()));
  call.key.push_back(ends_at_a_leaf());
  for (auto& a : args) {
    if (!call.add(a)) return nullptr;
  }
  if (!call.first) return call.no("the gradient is one of zeros, or some of its rows are none of the batch"), nullptr;
  if (*call.first->held->rows->marked) return call.no("autograd undoes a write to a part of a tensor"), nullptr;
  call.end();
  return find(call);
}

void kernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (enabled) {
    const size_t n = op.schema().arguments().size();
    Call call;
    if (const auto recipe = recipe_of(call, op, torch::jit::last(*stack, n))) {
      hits++;
      if (PyList_GET_SIZE(reports)) {
        py::gil_scoped_acquire gil;
        py::reinterpret_borrow<py::object>(note)("sliced", recipe->name);
      }
      const auto held = call.first->held;
      return replay(*recipe, op, n, stack, held);
    }
    misses++;
  }
  at::impl::MaybeSetTLSOnEntryGuard entry;
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::PythonTLSSnapshot), stack);
}

// --- Python --------------------------------------------------------------------------------------------------------

Layout layout_from(const py::handle& numbers) {
  return std::make_shared<const Ints>(numbers.cast<Ints>());
}

// A Python object that the last of its holders lets go with the GIL.
std::shared_ptr<py::object> shared(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* held) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete held;
  });
}

// Of a number, or of each in a list: the factor if it is a multiple of the kept rows, else 0. Empty if none is.
Ints factors_of(const py::object& value) {
  const bool many = py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value);
  Ints factors;
  for (auto each : many ? value : py::make_tuple(value)) {
    factors.push_back(py::hasattr(each, "factor") ? each.attr("factor").cast<int64_t>() : 0);
  }
  return std::all_of(factors.begin(), factors.end(), [](int64_t f) { return f == 0; }) ? Ints() : factors;
}

// The others of these numbers, and 0 in the place of multiples; a number by itself is a multiple.
IValue numbers_of(const py::object& value) {
  if (py::hasattr(value, "factor")) return IValue(static_cast<int64_t>(0));
  Ints numbers;
  for (auto each : value) numbers.push_back(py::hasattr(each, "factor") ? 0 : each.cast<int64_t>());
  return IValue(std::move(numbers));
}

// A step is (name, overload, arguments, results), (None, source, layout, inner, result) for a gather, or
// ("", which, result) for what is derived from the rows. An argument is ("one", register), ("list", registers),
// ("const", value) or ("default",).
Step step_from(const py::tuple& t) {
  Step s;
  if (t[0].is_none()) {
    s.source = t[1].cast<int64_t>();
    s.layout = layout_from(t[2]);
    for (auto each : t[3]) s.inner.push_back(step_from(each.cast<py::tuple>()));
    s.outs = {t[4].cast<int64_t>()};
    return s;
  }
  if (t[0].cast<std::string>().empty()) {
    s.which = shared(t[1]);
    s.outs = {t[2].cast<int64_t>()};
    return s;
  }
  s.op = c10::Dispatcher::singleton().findSchemaOrThrow(t[0].cast<std::string>().c_str(), t[1].cast<std::string>().c_str());
  auto given = t[2].cast<std::vector<py::tuple>>();
  auto& arguments = s.op->schema().arguments();
  TORCH_CHECK(given.size() == arguments.size(), "a recipe names each argument");
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& about = arguments[i];
    const auto kind = given[i][0].cast<std::string>();
    Arg arg;
    if (kind == "one") {
      arg.kind = Arg::one;
      arg.at = {given[i][1].cast<int64_t>()};
    } else if (kind == "list") {
      arg.kind = Arg::list;
      arg.at = given[i][1].cast<Ints>();
      if (about.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) arg.value = true;
    } else if (kind == "default") {
      TORCH_CHECK(about.default_value(), "an argument without a default");
      arg.value = *about.default_value();
    } else if (auto factors = factors_of(given[i][1]); !factors.empty()) {
      arg.kind = Arg::kept;
      arg.at = std::move(factors);
      if (about.type()->kind() != c10::TypeKind::TensorType) arg.value = numbers_of(given[i][1]);
    } else if (about.type()->kind() == c10::TypeKind::TensorType && !given[i][1].is_none()) {  // a number
      arg.value = number(torch::jit::toIValue(given[i][1], c10::NumberType::get()).toScalar());
    } else {
      arg.value = torch::jit::toIValue(given[i][1], about.type());
    }
    s.args.push_back(std::move(arg));
  }
  s.outs = t[3].cast<Ints>();
  return s;
}

// None, or the number of kept rows of the pending call, and what was recorded of it before: None, or the lowest and the
// highest number of kept rows, and the recording, None for a rule that cannot be recorded.
py::object wanted(int64_t op) {
  if (!pending || pending->key[0] != op) return py::none();
  std::shared_ptr<Recipe> r;
  {
    std::lock_guard<std::mutex> held(guard);
    auto found = recipes.find(pending->key);
    if (found != recipes.end()) r = found->second;
  }
  if (!r) return py::make_tuple(pending->kept, py::none());
  return py::make_tuple(pending->kept, py::make_tuple(r->low, r->high, r->recording ? *r->recording : py::object(py::none())));
}

// The recipe of the pending call, from `low` to `high` kept rows. Without a recording Python runs the call.
void put(const py::object& recording, int64_t low, int64_t high, bool apart, const std::string& reason) {
  if (!pending) return;
  auto r = std::make_shared<Recipe>();
  r->low = low;
  r->high = high;
  r->apart = apart;
  r->why = reason;
  if (!recording.is_none()) {
    auto t = recording.cast<py::tuple>();
    for (auto each : t[0]) r->steps.push_back(step_from(each.cast<py::tuple>()));
    r->registers = t[1].cast<int64_t>();
    for (auto each : t[2]) {
      auto o = each.cast<py::tuple>();
      r->outs.push_back({o[0].cast<int64_t>(), o[1].is_none() ? nullptr : layout_from(o[1]), o[2].cast<Ints>()});
    }
    r->list = t[3].cast<bool>();
    r->views = t[4].cast<bool>();
    r->name = t[5].cast<std::string>();
    r->tensors = t[6].cast<std::vector<bool>>();
    r->recording = shared(recording);
  }
  {
    std::lock_guard<std::mutex> held(guard);
    std::swap(recipes[pending->key], r);
  }
  pending.reset();
}

// --- the graph -----------------------------------------------------------------------------------------------------

// The nodes that a backward has walked over; they live as long as this.
struct Walked {
  std::unordered_set<torch::autograd::Node*> known;
  std::vector<decltype(torch::autograd::Edge::function)> nodes;
};

enum class Kind { special, ordinary, leaf };
std::unordered_map<const std::type_info*, Kind> kinds;  // ordinary: autograd's own formulas, which need nothing

Kind& kind_of(const torch::autograd::Node& node) {
  const auto* type = &typeid(node);
  auto found = kinds.find(type);
  if (found == kinds.end()) {
    const bool leaf = *type == typeid(torch::autograd::AccumulateGrad);
    found = kinds.emplace(type, leaf ? Kind::leaf : Kind::special).first;
  }
  return found->second;
}

// The nodes upstream of `start`, with itself, that were not walked over yet and are not ordinary; leaves are left out.
// None: Python has to walk, as a leaf has hooks, or autograd was asked for the gradients of some tensors alone.
py::object special(Walked& walked, py::handle start) {
  using torch::autograd::AccumulateGrad;
  const auto* limits = torch::autograd::get_current_graph_task_exec_info();
  if (!limits || !limits->empty()) return py::none();
  auto first = torch::autograd::get_current_node();
  if (torch::autograd::THPCppFunction_Check(start.ptr())) {
    first = reinterpret_cast<torch::autograd::THPCppFunction*>(start.ptr())->cdata;
  } else if (!first || py::reinterpret_steal<py::object>(functionToPyObject(first)).ptr() != start.ptr()) {
    return py::none();
  }
  const size_t before = walked.nodes.size();
  auto meet = [&](const auto& node) {
    if (node && walked.known.insert(node.get()).second) walked.nodes.push_back(node);
  };
  meet(first);
  py::list found;
  for (size_t i = before; i < walked.nodes.size(); i++) {
    const auto node = walked.nodes[i];
    const Kind kind = kind_of(*node);
    if (kind == Kind::leaf) {
      if (torch::autograd::impl::hooks(static_cast<AccumulateGrad&>(*node).variable).empty()) continue;
      for (size_t j = before; j < walked.nodes.size(); j++) walked.known.erase(walked.nodes[j].get());
      walked.nodes.resize(before);
      return py::none();
    }
    for (auto& edge : node->next_edges()) meet(edge.function);
    if (kind == Kind::special) found.append(py::reinterpret_steal<py::object>(functionToPyObject(node)));
  }
  return found;
}

// These nodes' types are ordinary.
void learn(const std::vector<py::object>& nodes) {
  for (auto& node : nodes) kind_of(*reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata) = Kind::ordinary;
}

std::vector<std::unique_ptr<torch::Library>> libraries;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Rows, std::shared_ptr<Rows>>(m, "Rows")
      .def(py::init([](Tensor index, Ints traits, const std::shared_ptr<Rows>& origin) {
             auto r = std::make_shared<Rows>();
             r->marked = origin ? origin->marked : std::make_shared<std::atomic<bool>>(false);
             r->kept = index.numel();
             r->index = std::move(index);
             r->traits = std::move(traits);
             return r;
           }), py::arg("index"), py::arg("traits"), py::arg("origin").none(true))
      .def("hook", [](Rows& r, bool on) { r.hooked = on; })
      .def("mark", [](Rows& r, bool on) { *r.marked = on; })
      .def("remembered", [](Rows& r, const Tensor& source, const Ints& layout) -> std::optional<Tensor> {
             auto found = remembered(r, source, std::make_shared<const Ints>(layout));
             return found.defined() ? std::optional<Tensor>(found) : std::nullopt;
           })
      .def("remember", [](const std::shared_ptr<Rows>& r, const Tensor& source, const Ints& layout, const Tensor& result) {
             remember(r, source, std::make_shared<const Ints>(layout), result);
           });
  m.def("setup", [](py::object type, const std::vector<std::string>& ops, py::object open_reports, py::object told, py::object hooked, py::object made) {
    row_grad = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    reports = open_reports.release().ptr();
    note = told.release().ptr();
    unpacks = hooked.release().ptr();
    derived = made.release().ptr();
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::PythonTLSSnapshot, __FILE__, __LINE__);
    for (auto& name : ops) library->impl(name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    libraries.push_back(std::move(library));
  });
  py::class_<Walked>(m, "Walked").def(py::init<>()).def("special", &special);
  m.def("learn", &learn);
  m.def("enable", [](bool on) { enabled = on; });
  m.def("forget", [] {
    Table old;
    {
      std::lock_guard<std::mutex> held(guard);
      std::swap(old, recipes);
    }
  });
  m.def("counts", [] { std::lock_guard<std::mutex> held(guard); return py::make_tuple(hits.exchange(0), misses.exchange(0), recipes.size()); });
  m.def("make", [](Tensor values, py::object rowset, const std::shared_ptr<Rows>& rows, const Ints& layout, const Ints& sizes) {
    auto held = std::make_shared<Held>(std::move(rowset), rows);
    Tensor t = wrap(std::move(values), std::move(held), std::make_shared<const Ints>(layout), sizes);
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(t, row_grad));
  });
  m.def("payload", [](const Tensor& t) -> py::object {  // the values, the rows, the layout, the stream
    auto* r = row(t);
    return r && r->live ? py::object(py::make_tuple(r->values, r->held->rowset, *r->layout, r->stream)) : py::none();
  });
  m.def("viewed", [](const Tensor& t) -> py::object {  // the gradient viewed, the op, its further arguments, the place
    auto* r = row(t);
    if (!r || !r->viewed) return py::none();
    py::list rest;
    for (auto& v : r->viewed->rest) rest.append(torch::jit::toPyObject(v));
    auto& name = r->viewed->op.operator_name();
    return py::make_tuple(r->viewed->base, name.name, name.overload_name, rest, r->place < 0 ? py::object(py::none()) : py::object(py::int_(r->place)));
  });
  m.def("take_over", [](const Tensor& t) {
    if (auto* r = row(t)) {
      r->live = false;
      r->values = Tensor();
    }
  });
  m.def("wanted", &wanted);
  m.def("why", [] { return why; });
  m.def("number", [](const std::string& name, const std::string& overload) -> int64_t {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    return op ? reinterpret_cast<int64_t>(&op->schema()) : 0;
  });
  m.def("put", &put);
}
