# Finds OpenBLAS as the target `open_blas`: from the Python package scipy-openblas32, else from the system.
#
# The package is a build requirement that an isolated build removes afterwards, so its library is installed with the
# emulator: OPEN_BLAS_BUNDLED names it. The system's stays where it is.
find_package(Python COMPONENTS Interpreter)
set(OPEN_BLAS_BUNDLED "")
add_library(open_blas INTERFACE)

if(Python_Interpreter_FOUND)
    execute_process(
        COMMAND ${Python_EXECUTABLE} -c
            "import scipy_openblas32 as b; print(b.get_include_dir(), b.get_lib_dir(), b.get_library(), sep=';')"
        OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
        list(GET found 0 include_dir)
        list(GET found 1 library_dir)
        list(GET found 2 library)
        set(OPEN_BLAS_BUNDLED "${library_dir}/lib${library}.so")
    endif()
endif()

if(OPEN_BLAS_BUNDLED)
    target_include_directories(open_blas SYSTEM INTERFACE ${include_dir})
    target_link_libraries(open_blas INTERFACE ${OPEN_BLAS_BUNDLED})
    # The package puts this in front of every name, so that it can live beside another OpenBLAS.
    target_compile_definitions(open_blas INTERFACE OPEN_BLAS_SCIPY)
    message(STATUS "Matrix products: ${OPEN_BLAS_BUNDLED}")
else()
    find_path(system_include_dir cblas.h PATH_SUFFIXES openblas openblas-pthread)
    find_library(system_library openblas)
    if(NOT system_include_dir OR NOT system_library)
        message(FATAL_ERROR "The emulator needs OpenBLAS: pip install scipy-openblas32, or apt install libopenblas-dev")
    endif()
    target_include_directories(open_blas SYSTEM INTERFACE ${system_include_dir})
    target_link_libraries(open_blas INTERFACE ${system_library})
    message(STATUS "Matrix products: ${system_library}")
endif()
