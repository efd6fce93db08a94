/* Rows of tensors, at the speed of memory: what `row_copy.py` does by torch without it.
 *
 * Addresses are those of contiguous CPU tensors that the caller holds meanwhile. Built against
 * Python's stable interface.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST_FIELDS 256
#define TILE 32 /* rows copied at a time, field by field: they stay in the nearest cache */

/* Copy items of `bytes`, at least 16, of which `blocks` blocks of 16 are the greater part. */
static inline void spread_blocks(char *to, Py_ssize_t stride, const char *from,
                                 const Py_ssize_t bytes, Py_ssize_t rows, const int blocks)
{
    Py_ssize_t i;
    int k;
    for (i = 0; i < rows; i++, to += stride, from += bytes) {
        for (k = 0; k < blocks; k++) memcpy(to + 16 * k, from + 16 * k, 16);
        memcpy(to + bytes - 16, from + bytes - 16, 16); /* the rest, and some once more */
    }
}

/* Copy `rows` items of `bytes` each from packed memory to places `stride` apart. */
static void spread(char *to, Py_ssize_t stride, const char *from, Py_ssize_t bytes,
                   Py_ssize_t rows)
{
    Py_ssize_t i;
    switch (bytes) {
    case 1:
        for (i = 0; i < rows; i++) to[i * stride] = from[i];
        return;
    case 4:
        for (i = 0; i < rows; i++) memcpy(to + i * stride, from + 4 * i, 4);
        return;
    case 8:
        for (i = 0; i < rows; i++) memcpy(to + i * stride, from + 8 * i, 8);
        return;
    }
    switch (bytes < 16 ? 0 : bytes / 16) { /* constants, so that the loops are laid out flat */
#define BLOCKS(n) case n: spread_blocks(to, stride, from, bytes, rows, n); return;
        BLOCKS(1) BLOCKS(2) BLOCKS(3) BLOCKS(4) BLOCKS(5) BLOCKS(6) BLOCKS(7) BLOCKS(8)
#undef BLOCKS
    }
    for (i = 0; i < rows; i++) memcpy(to + i * stride, from + i * bytes, (size_t)bytes);
}

/* Copy so many fields of one byte each that lie side by side: flags, most often. */
static inline void spread_flags(char *to, Py_ssize_t stride, const int64_t *from,
                                Py_ssize_t first, Py_ssize_t rows, const int flags)
{
    Py_ssize_t i;
    int k;
    for (i = 0; i < rows; i++, to += stride) {
        uint64_t all = 0;
        for (k = 0; k < flags; k++) {
            uint64_t flag = *((const uint8_t *)(uintptr_t)from[k] + first + i);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            all |= flag << (56 - 8 * k);
#else
            all |= flag << (8 * k);
#endif
        }
        memcpy(to, &all, (size_t)flags);
    }
}

/* How many fields from `j` on, at most 8, are of one byte each and lie side by side. */
static Py_ssize_t flags_from(const int64_t *spec, Py_ssize_t j, Py_ssize_t fields)
{
    Py_ssize_t k = 0;
    while (k < 8 && j + k < fields && spec[2 * (j + k) + 1] == 1 &&
           spec[2 * (j + k)] == spec[2 * j] + k)
        k++;
    return k;
}

/* Copy rows `first` and on of all fields to their places from `to` on. */
static void put_rows(char *to, Py_ssize_t stride, const int64_t *spec, const int64_t *from,
                     Py_ssize_t fields, Py_ssize_t first, Py_ssize_t rows)
{
    Py_ssize_t j = 0;
    while (j < fields) {
        char *place = to + spec[2 * j];
        Py_ssize_t flags = flags_from(spec, j, fields);
        switch (flags) {
#define FLAGS(n) case n: spread_flags(place, stride, from + j, first, rows, n); break;
            FLAGS(2) FLAGS(3) FLAGS(4) FLAGS(5) FLAGS(6) FLAGS(7) FLAGS(8)
#undef FLAGS
        default:
            spread(place, stride, (const char *)(uintptr_t)from[j] + first * spec[2 * j + 1],
                   spec[2 * j + 1], rows);
            flags = 1;
        }
        j += flags;
    }
}

/* put(fields, block, row_bytes, capacity, at, count, sources)
 *
 * fields: bytes of int64 triples, by offset: offset and size in a row, and which source it is;
 * sources: bytes of int64 addresses. */
static PyObject *put(PyObject *module, PyObject *args)
{
    const char *plan, *addresses;
    Py_ssize_t plan_bytes, address_bytes, row_bytes, capacity, at, count, fields, done, j;
    unsigned long long block;
    int64_t from[MOST_FIELDS], spec[2 * MOST_FIELDS], field[3];

    (void)module;
    if (!PyArg_ParseTuple(args, "y#Knnnny#", &plan, &plan_bytes, &block, &row_bytes, &capacity,
                          &at, &count, &addresses, &address_bytes))
        return NULL;
    fields = address_bytes / 8;
    if (fields > MOST_FIELDS || plan_bytes != fields * 24 || at < 0 || at >= capacity ||
        count < 0 || count > capacity) {
        PyErr_Format(PyExc_ValueError,
                     "cannot put rows: %zd at %zd of %zd with %zd fields of %zd (expected rows "
                     "within the block, and a source for each field). Check the caller.",
                     count, at, capacity, fields, plan_bytes / 24);
        return NULL;
    }
    for (j = 0; j < fields; j++) {
        memcpy(field, plan + 24 * j, sizeof field);
        if (field[2] < 0 || field[2] >= fields) {
            PyErr_Format(PyExc_ValueError,
                         "cannot put rows: source %lld of %zd (expected one of them). Check "
                         "the caller.", (long long)field[2], fields);
            return NULL;
        }
        memcpy(&spec[2 * j], field, 16);
        memcpy(&from[j], addresses + 8 * field[2], 8);
    }
    Py_BEGIN_ALLOW_THREADS
    for (done = 0; done < count;) {
        Py_ssize_t place = (at + done) % capacity, rows = count - done;
        char *to = (char *)(uintptr_t)block + place * row_bytes;
        if (rows > capacity - place) rows = capacity - place;
        if (rows > TILE) rows = TILE;
        put_rows(to, row_bytes, spec, from, fields, done, rows);
        done += rows;
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Bits of numbers, which need not be aligned in a buffer that torch was given. */
typedef uint32_t __attribute__((aligned(1), may_alias)) bits32;
typedef uint64_t __attribute__((aligned(1), may_alias)) bits64;

static int is_finite(const void *items, int64_t count, int64_t itemsize)
{
    int64_t i;
    if (itemsize == 4) {
        const bits32 *bits = items;
        uint32_t bad = 0;
        for (i = 0; i < count; i++) bad |= (bits[i] & 0x7f800000u) == 0x7f800000u;
        return !bad;
    }
    const bits64 *bits = items;
    const uint64_t exponent = 0x7ff0000000000000u;
    uint64_t bad = 0;
    for (i = 0; i < count; i++) bad |= (bits[i] & exponent) == exponent;
    return !bad;
}

typedef struct {
    PyObject *tensor, *tensordict;                  /* the classes */
    PyObject *shapes, *dtypes;                      /* tuples, what to expect of each field */
    const char *finite;                             /* see `find` */
    PyObject *_tensordict, *shape, *dtype, *is_cpu; /* names of attributes */
    PyObject *is_contiguous, *is_neg, *data_ptr;
    Py_ssize_t fields, found;
    PyObject *tensors;
    int64_t address[MOST_FIELDS];
} Search;

/* An attribute of a tensor, or the result of its method, is True (1), is not (0), error (-1). */
static int holds(PyObject *tensor, PyObject *name, int method)
{
    PyObject *value = method ? PyObject_CallMethodObjArgs(tensor, name, NULL)
                             : PyObject_GetAttr(tensor, name);
    int result = value == NULL ? -1 : value == Py_True;
    Py_XDECREF(value);
    return result;
}

static int number(PyObject *tensor, PyObject *name, int64_t *result)
{
    PyObject *value = PyObject_CallMethodObjArgs(tensor, name, NULL);
    if (value == NULL) return -1;
    *result = (int64_t)PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 1;
}

/* Note one tensor: 1 if it can be copied as it lies, 0 if not, -1 with an error. */
static int take(Search *search, PyObject *tensor)
{
    Py_ssize_t i = search->found;
    PyObject *value;
    int64_t check[2];
    int same;

    if ((PyObject *)Py_TYPE(tensor) != search->tensor || i >= search->fields) return 0;
    value = PyObject_GetAttr(tensor, search->dtype);
    if (value == NULL) return -1;
    same = value == PyTuple_GetItem(search->dtypes, i);
    Py_DECREF(value);
    if (!same) return 0;
    value = PyObject_GetAttr(tensor, search->shape);
    if (value == NULL) return -1;
    same = PyObject_RichCompareBool(value, PyTuple_GetItem(search->shapes, i), Py_EQ);
    Py_DECREF(value);
    if (same <= 0) return same;
    if ((same = holds(tensor, search->is_cpu, 0)) <= 0) return same;
    if ((same = holds(tensor, search->is_contiguous, 1)) <= 0) return same;
    if ((same = holds(tensor, search->is_neg, 1)) != 0) return same < 0 ? -1 : 0;
    if (number(tensor, search->data_ptr, &search->address[i]) < 0) return -1;
    if (!search->address[i]) return 0; /* no elements, or none in memory: torch knows */
    memcpy(check, search->finite + 16 * i, sizeof check);
    if (check[0] && !is_finite((const void *)(uintptr_t)search->address[i], check[0], check[1]))
        return 0;
    Py_INCREF(tensor);
    if (PyTuple_SetItem(search->tensors, i, tensor) < 0) return -1;
    search->found++;
    return 1;
}

/* Note the tensors of a TensorDict that has just the entries of a tree: 1, 0 or -1 as above. */
static int walk(Search *search, PyObject *rows, PyObject *tree)
{
    PyObject *names = PyTuple_GetItem(tree, 0), *children = PyTuple_GetItem(tree, 1), *entries;
    Py_ssize_t i, count = PyTuple_Size(names);
    int result = 1;

    if ((PyObject *)Py_TYPE(rows) != search->tensordict) return 0;
    entries = PyObject_GetAttr(rows, search->_tensordict);
    if (entries == NULL) return -1;
    if (!PyDict_CheckExact(entries) || PyDict_Size(entries) != count) result = 0;
    for (i = 0; i < count && result > 0; i++) {
        PyObject *entry = PyDict_GetItemWithError(entries, PyTuple_GetItem(names, i));
        PyObject *child = PyTuple_GetItem(children, i);
        if (entry == NULL) {
            result = PyErr_Occurred() ? -1 : 0;
        } else {
            Py_INCREF(entry);
            result = child == Py_None ? take(search, entry) : walk(search, entry, child);
            Py_DECREF(entry);
        }
    }
    Py_DECREF(entries);
    return result;
}

/* find(classes, attributes, tree, shapes, dtypes, finite, rows)
 *
 * The tensors of rows and their addresses, or None if they are not as expected, not finite, or
 * not to be copied as they lie. tree: names, and for each None or the tree below; finite: bytes
 * of int64 pairs, how many elements of a field to look at, of how many bytes (4 or 8) each. */
static PyObject *find(PyObject *module, PyObject *args)
{
    Search search;
    PyObject *classes, *names, *tree, *rows, *result = NULL;
    Py_ssize_t length;
    int found;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!y#O", &PyTuple_Type, &classes, &PyTuple_Type, &names,
                          &PyTuple_Type, &tree, &PyTuple_Type, &search.shapes, &PyTuple_Type,
                          &search.dtypes, &search.finite, &length, &rows))
        return NULL;
    search.fields = PyTuple_Size(search.shapes);
    if (search.fields > MOST_FIELDS || PyTuple_Size(search.dtypes) != search.fields ||
        length != 16 * search.fields || PyTuple_Size(classes) != 2 || PyTuple_Size(names) != 7) {
        PyErr_SetString(PyExc_ValueError,
                        "cannot find tensors of rows: lengths differ (expected one shape, dtype "
                        "and check for each field). Check the caller.");
        return NULL;
    }
    search.found = 0;
    search.tensor = PyTuple_GetItem(classes, 0);
    search.tensordict = PyTuple_GetItem(classes, 1);
    search._tensordict = PyTuple_GetItem(names, 0);
    search.shape = PyTuple_GetItem(names, 1);
    search.dtype = PyTuple_GetItem(names, 2);
    search.is_cpu = PyTuple_GetItem(names, 3);
    search.is_contiguous = PyTuple_GetItem(names, 4);
    search.is_neg = PyTuple_GetItem(names, 5);
    search.data_ptr = PyTuple_GetItem(names, 6);
    search.tensors = PyTuple_New(search.fields);
    if (search.tensors == NULL) return NULL;
    found = walk(&search, rows, tree);
    if (found > 0 && search.found == search.fields)
        result = Py_BuildValue("(Oy#)", search.tensors, (const char *)search.address,
                               search.fields * 8);
    else if (found >= 0)
        result = Py_NewRef(Py_None);
    Py_DECREF(search.tensors);
    return result;
}

/* is_run(address, count, first, capacity): int64 positions first, first + 1, ... in a circle */
static PyObject *is_run(PyObject *module, PyObject *args)
{
    unsigned long long address;
    Py_ssize_t count, first, capacity, i;
    const int64_t *positions;
    uint64_t wrong = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "Knnn", &address, &count, &first, &capacity)) return NULL;
    positions = (const int64_t *)(uintptr_t)address;
    for (i = 0; i < count && first + i < capacity; i++)
        wrong |= (uint64_t)(positions[i] ^ (int64_t)(first + i));
    for (; i < count; i++) wrong |= (uint64_t)(positions[i] ^ (int64_t)((first + i) % capacity));
    return PyBool_FromLong(!wrong);
}

static PyMethodDef methods[] = {
    {"put", put, METH_VARARGS, NULL},
    {"find", find, METH_VARARGS, NULL},
    {"is_run", is_run, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModule_Create(&definition);
}
